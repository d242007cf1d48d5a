"""`retrain audit --contamination`: whether what a run is evaluated on is in its training data, or in its model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.verifier import TimedScore
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, SampleRequest, SamplingParams
from retrain.tasks.audit.contamination import Contamination, HeldOutIndex, Match, contamination, task_text, words_of
from retrain.tasks.tasks import Tasks, load_tasks
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import load_tokenizer

# Whether a model knows the held-out prompts by heart: it completes what the first 60 % of each begin.
#
# After Wu et al. 2025 (arXiv:2507.10532): Qwen2.5-Math-7B completes 54.6 % of MATH-500 so, and none of the problems
# that were written after it was trained. As there, decoding is greedy and the prompt stands alone, without a chat
# template. Other than there, a rest of fewer than five words is not tried, since a good guess would complete it.


GIVEN_SHARE = 0.6
LEAST_REST = 5  # words to complete
BATCH = 64  # prompts in one call of the backend
_WORD = re.compile(r"\S+")

Scorer = Callable[[Sequence[tuple[Example, str]]], Sequence[TimedScore]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """One example: the share of the rest that the model wrote, as ROUGE-L (0 to 1), and whether word for word."""

    example_id: str
    is_exact: bool
    rouge_l: float
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What the model completed. `too_short` examples leave too little to complete, and were not tried."""

    tried: tuple[Completed, ...]
    too_short: int

    @property
    def exact_rate(self) -> float | None:
        """Share of the tried prompts whose rest it reproduced, word for word; None when none could be tried."""
        return self._mean([float(each.is_exact) for each in self.tried])

    @property
    def rouge_l(self) -> float | None:
        """Mean ROUGE-L of the rests; None when none could be tried."""
        return self._mean([each.rouge_l for each in self.tried])

    @property
    def right_rate(self) -> float | None:
        """Share of the tried prompts that it answered rightly from the first part alone; None when none was tried."""
        return self._mean([float(each.is_right) for each in self.tried])

    def _mean(self, values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        exact = [each.example_id for each in self.tried if each.is_exact]
        rates = {"exact_rate": self.exact_rate, "rouge_l": self.rouge_l, "right_rate": self.right_rate}
        return {"tried": len(self.tried), "too_short": self.too_short, **rates, "exact": exact}


def parted(text: str) -> tuple[str, str] | None:
    """The first 60 % of a text, in words, and the rest; None when the rest has fewer than five words."""
    ends = [match.end() for match in _WORD.finditer(text)]
    cut = ends[int(len(ends) * GIVEN_SHARE) - 1] if len(ends) * GIVEN_SHARE >= 1 else 0
    given, rest = text[:cut], text[cut:]
    return (given, rest) if given and len(words_of(rest)) >= LEAST_REST else None


def probe(
    examples: Sequence[Example],
    backend: Backend,
    tokenizer: Any,
    scorer: Scorer,
    *,
    max_tokens: int,
    correct_above: float,
) -> ProbeReport:
    """Let the backend's policy complete each prompt, greedily, in at most `max_tokens` tokens; `scorer` judges answers.

    BackendError and whatever else the backend or the verifier raises pass through.
    """
    parts = [(example, found) for example in examples if (found := parted(task_text(example)))]
    texts: list[str] = []
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, greedy=True)
    for start in range(0, len(parts), BATCH):
        given = [beginning for _, (beginning, _) in parts[start : start + BATCH]]
        ids = tokenizer(given, add_special_tokens=False, verbose=False)["input_ids"]
        requests = [SampleRequest(prompt_T=np.asarray(row, dtype=np.int64), seeds_G=(0,)) for row in ids]
        for (sample,) in backend.sample(requests, params):
            texts.append(str(tokenizer.decode(sample.tokens_T, skip_special_tokens=True)))
    scores = scorer([(example, text) for (example, _), text in zip(parts, texts, strict=True)]) if parts else ()
    tried = []
    for (example, (_, rest)), text, timed in zip(parts, texts, scores, strict=True):
        wanted = words_of(rest)
        written = words_of(text)[: len(wanted)]
        value = timed.score.value
        tried.append(
            Completed(
                example_id=example.id,
                is_exact=written == wanted,
                rouge_l=rouge_l(wanted, written),
                is_right=value is not None and value > correct_above,
            )
        )
    return ProbeReport(tried=tuple(tried), too_short=len(examples) - len(parts))


def rouge_l(wanted: Sequence[str], written: Sequence[str]) -> float:
    """ROUGE-L (Lin 2004), the F1 of the longest common subsequence: 2 LCS / (len(wanted) + len(written)); 0 to 1."""
    if not wanted or not written:
        return 0.0
    row = [0] * (len(written) + 1)
    for word in wanted:
        before = 0
        for column, other in enumerate(written, start=1):
            above = row[column]
            row[column] = before + 1 if word == other else max(above, row[column - 1])
            before = above
    return 2 * row[-1] / (len(wanted) + len(written))


HELD_OUT = "held_out"  # the set of [eval] examples
ALLOWED = 0.01  # of a set's examples: one of 64 is too many
PROBED = 64  # prompts that the model is given, unless --examples says otherwise
SHOWN = 10
DRAW = Seeds(0)  # the same prompts whatever the run's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContaminationReport:
    """Every set against the training data and, where it was asked for, the model on the prompts of every set.

    `allowed` is the share of a set's examples above which the set is contaminated.
    """

    sets: tuple[Contamination, ...]
    probes: dict[str, ProbeReport]
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether no set is contaminated."""
        rates: list[float | None] = [each.rate for each in self.sets]
        rates += [each.exact_rate for each in self.probes.values()]
        return all(rate is None or rate <= self.allowed for rate in rates)

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        probes = {name: each.as_data() for name, each in self.probes.items()}
        return {"ok": self.ok, "allowed": self.allowed, "sets": [s.as_data() for s in self.sets], "probes": probes}


def audit_contamination(
    config: Config,
    plugins: Plugins,
    *,
    words: int,
    allowed: float,
    open_backend: Callable[[PluginContext], Backend] | None = None,
    examples: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ContaminationReport:
    """Load the data as a run does and hold every evaluated set against it; ConfigError when nothing is evaluated.

    With `open_backend` the model completes prompts, at most `examples` of each set; `say` tells the cost.
    """
    context = PluginContext(
        config=config,
        seeds=Seeds.from_config(config.training.seed),
        plugins=plugins,
        tokenizer=load_tokenizer(config, plugins),
    )
    tasks = load_tasks(context)
    with closing(tasks.verifier), _evaluated(tasks, context) as sets:
        if not sets:
            what, fix = "nothing is evaluated, so nothing can be contaminated", "set [eval] examples, or [eval.sets]"
            raise ConfigError(Problem(where=config.place("eval.examples"), what=what, fix=fix))
        indices = [HeldOutIndex.of(name, found, words=words) for name, (found, _) in sets.items()]
        found = contamination(indices, (prompt.example for prompt in tasks.pool.train))
        probes = _probed(sets, context, examples or PROBED, open_backend, say) if open_backend else {}
    return ContaminationReport(sets=found, probes=probes, allowed=allowed)


def report_lines(report: ContaminationReport) -> Iterator[str]:
    """The report for a terminal."""
    for each in report.sets:
        exact = sum(found.match is Match.EXACT for found in each.overlaps)
        yield f"{each.name}: {each.held_out} examples against {each.training} of training, runs of {each.words} words"
        yield f"  the same text             : {exact}"
        yield f"  nearly the same           : {len(each.overlaps) - exact}"
        yield f"  same words, other numbers : {each.templates} (a template, not contamination)"
        yield f"  some run in common        : {each.touched}"
        for found in each.overlaps[:SHOWN]:
            yield f"    {found.example_id} is {found.training_id} of training ({found.match}, {found.share:.0%})"
        if len(each.overlaps) > SHOWN:
            yield f"    and {len(each.overlaps) - SHOWN} more: --json has all of them"
    for name, tried in report.probes.items():
        yield f"{name}: {len(tried.tried)} prompts, of which the model was given the first {GIVEN_SHARE:.0%}"
        if tried.exact_rate is not None:
            yield f"  completed word for word   : {tried.exact_rate:.1%} (mean ROUGE-L {tried.rouge_l:.2f})"
            yield f"  answered rightly          : {tried.right_rate:.1%}"
        if tried.too_short:
            yield f"  too short to tell         : {tried.too_short}"
    shares = [f"{each.name} {each.rate:.1%}" for each in report.sets]
    shares += [
        f"{name} known by heart " + ("cannot be told" if each.exact_rate is None else f"{each.exact_rate:.1%}")
        for name, each in report.probes.items()
    ]
    yield f"Contaminated: {', '.join(shares)}; at most {report.allowed:.1%} of a set is allowed"


_Set = tuple[Sequence[Example], Any]  # its examples, and the verifier of their answers


@contextmanager
def _evaluated(tasks: Tasks, context: PluginContext) -> Iterator[dict[str, _Set]]:
    """The held-out examples, and the further sets of whoever evaluates, with what judges each."""
    sets: dict[str, _Set] = {}
    if tasks.pool.held_out:
        sets[HELD_OUT] = [prompt.example for prompt in tasks.pool.held_out], tasks.verifier
    evaluation = context.plugins.notify("retrain_evaluation", context=context, tasks=tasks)
    try:
        for each in getattr(evaluation, "sets", ()):  # those of `use/evaluate`; another plugin's may have none
            sets[each.name] = [prompt.example for prompt in each.prompts], each.verifier
        yield sets
    finally:
        if evaluation is not None:
            evaluation.close()


def _probed(
    sets: dict[str, _Set],
    context: PluginContext,
    examples: int,
    open_backend: Callable[[PluginContext], Backend],
    say: Callable[[str], None],
) -> dict[str, ProbeReport]:
    training = context.config.training
    chosen = {
        name: nsmallest(examples, found, key=lambda example: DRAW.derive("audit", example.id))
        for name, (found, _) in sets.items()
    }
    count = sum(map(len, chosen.values()))
    model, most = printable(context.config.model.model), count * training.max_tokens
    say(f"Completing {count} prompts with {model}: at most {most} tokens")
    backend = open_backend(context)
    try:
        return {
            name: probe(
                some,
                backend,
                context.tokenizer,
                sets[name][1].score_texts,
                max_tokens=training.max_tokens,
                correct_above=context.config.scoring.correct_above,
            )
            for name, some in chosen.items()
        }
    finally:
        backend.close()
