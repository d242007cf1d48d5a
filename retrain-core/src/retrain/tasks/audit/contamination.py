"""`retrain audit --contamination`: finds evaluated examples in a run's training data, or in its model.

A text is read as its words: normalised, without case and punctuation, with numbers and the signs of arithmetic. Texts
are nearly equal by their runs of n words. Held-out examples are indexed and training examples stream past, so memory is
bounded by the held-out side.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from heapq import nsmallest
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import TimedScore
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, SampleRequest, SamplingParams
from retrain.tasks.loading import load_tasks
from retrain.tasks.tasks import Tasks
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import load_tokenizer

# Runs of 8 to 13 words are in use; 13 is the length of GPT-3 (arXiv:2005.14165).
WORDS = 8
# Share of a held-out example's runs in one training example: two changed words of forty leave more than half.
NEAR = 0.5
# Runs that a near match needs unless it has them all: a short text may differ in the one word that counts.
LEAST_COMMON = 8
# A run that more of the held-out examples share belongs to their template.
TEMPLATE_SHARE = 0.1
LEAST_TEMPLATE = 3
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[-+*/=<>^%()×÷]")


class Match(StrEnum):
    """The way in which a held-out example is in the training data."""

    EXACT = "exact"  # the same words in the same order
    NEAR = "near"  # half of its runs of n words, at least 8 of them or all, and all of its numbers in one example


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A held-out example in the training data, its nearest training example, and the share of its runs found there."""

    example_id: str
    training_id: str
    match: Match
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contamination:
    """One set of held-out examples against the training data.

    `overlaps` has one entry per contaminated example, in the set's order. `touched` examples share at least one run
    with a training example, `templates` the words of one but not its numbers: neither is contamination.
    """

    name: str
    held_out: int
    training: int
    words: int
    overlaps: tuple[Overlap, ...]
    touched: int
    templates: int

    @property
    def rate(self) -> float:
        """Share of the held-out examples that training has seen."""
        return len(self.overlaps) / self.held_out if self.held_out else 0.0

    def as_data(self) -> dict[str, Any]:
        plain = asdict(self)
        overlaps = plain.pop("overlaps")
        return {**plain, "rate": self.rate, "overlaps": [*overlaps]}


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text: compatibility forms unified (NFKC), case folded, punctuation dropped."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def task_text(example: Example) -> str:
    """Return the prompt, or the user's turns of a chat: a system message is the same for every example."""
    if isinstance(example.prompt, str):
        return example.prompt
    asked = [str(message["content"]) for message in example.prompt if message["role"] == "user"]
    return "\n".join(asked or (str(message["content"]) for message in example.prompt))


@dataclass(slots=True, kw_only=True, eq=False)
class _HeldOut:
    example_id: str
    words: tuple[str, ...]
    runs: frozenset[int]
    best: Overlap | None = None
    is_touched: bool = False
    is_template: bool = False

    @property
    def numbers(self) -> Counter[str]:
        return _numbers(self.words)


@dataclass(slots=True, kw_only=True, eq=False)
class HeldOutIndex:
    """The held-out examples of one set by their texts and their runs of `words` words.

    A run in more than a tenth of the examples, and at least three, belongs to their template and is left out.
    """

    name: str
    words: int = WORDS
    _examples: list[_HeldOut] = field(default_factory=list)
    _by_text: dict[tuple[str, ...], list[_HeldOut]] = field(default_factory=dict)
    _by_run: dict[int, list[_HeldOut]] = field(default_factory=dict)
    _training: int = 0

    @classmethod
    def of(cls, name: str, examples: Sequence[Example], *, words: int = WORDS) -> HeldOutIndex:
        index = cls(name=name, words=words)
        read = [(example.id, words_of(task_text(example))) for example in examples]
        counts = Counter(run for _, found in read for run in _runs(found, words))
        most = max(LEAST_TEMPLATE - 1, TEMPLATE_SHARE * len(read))
        for example_id, found in read:
            runs = frozenset(run for run in _runs(found, words) if counts[run] <= most)
            each = _HeldOut(example_id=example_id, words=found, runs=runs)
            index._examples.append(each)
            index._by_text.setdefault(found, []).append(each)
            for run in runs:
                index._by_run.setdefault(run, []).append(each)
        return index

    def see(self, example: Example) -> None:
        """Compare one training example with all held-out ones, and keep only its id if it matches."""
        self._training += 1
        words = words_of(task_text(example))
        for each in self._by_text.get(words, ()):
            each.best = Overlap(example_id=each.example_id, training_id=example.id, match=Match.EXACT, share=1.0)
        common: dict[int, tuple[_HeldOut, int]] = {}
        for run in _runs(words, self.words):
            for each in self._by_run.get(run, ()):
                common[id(each)] = each, common.get(id(each), (each, 0))[1] + 1
        numbers = _numbers(words) if common else Counter[str]()
        for each, count in common.values():
            self._weigh(each, example, numbers, count)

    def _weigh(self, each: _HeldOut, example: Example, numbers: Counter[str], count: int) -> None:
        each.is_touched, share = True, count / len(each.runs)
        is_near = share >= NEAR and (count >= LEAST_COMMON or share == 1.0)
        if not is_near or (each.best and each.best.share >= share):
            return
        # Equal words around other numbers are the same template with another task, as in generated arithmetic.
        if each.numbers <= numbers:
            each.best = Overlap(example_id=each.example_id, training_id=example.id, match=Match.NEAR, share=share)
        else:
            each.is_template = True

    def found(self) -> Contamination:
        return Contamination(
            name=self.name,
            held_out=len(self._examples),
            training=self._training,
            words=self.words,
            overlaps=tuple(each.best for each in self._examples if each.best),
            touched=sum(each.is_touched for each in self._examples),
            templates=sum(each.is_template and each.best is None for each in self._examples),
        )


def contamination(sets: Iterable[HeldOutIndex], training: Iterable[Example]) -> tuple[Contamination, ...]:
    indices = list(sets)
    for example in training:
        for index in indices:
            index.see(example)
    return tuple(index.found() for index in indices)


def _runs(words: Sequence[str], size: int) -> set[int]:
    """Return the hashes of all runs of `size` words; a shorter text only matches as a whole."""
    return {hash(tuple(words[start : start + size])) for start in range(len(words) - size + 1)}


def _numbers(words: Sequence[str]) -> Counter[str]:
    return Counter(word for word in words if word[0].isdigit())


# Memorised prompts: the model completes each held-out prompt from its first 60 %.
#
# After Wu et al. 2025 (arXiv:2507.10532): Qwen2.5-Math-7B completes 54.6 % of MATH-500, and none of the problems
# that were written after it was trained. As there, decoding is greedy and the prompt is given without a chat
# template. Unlike there, a rest of fewer than five words is not tried, since a good guess would complete it.


GIVEN_SHARE = 0.6
LEAST_REST = 5  # words to complete
BATCH = 64  # prompts in one call of the backend

Scorer = Callable[[Sequence[tuple[Example, str]]], Sequence[TimedScore]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The model's completions; `too_short` examples leave too few words to complete and were not tried.

    Shares of the tried prompts: `exact_rate` of rests reproduced word for word, for the examples `exact`, and
    `right_rate` of answers that are right from the first part; `rouge_l` is the mean of the rests. None without any.
    """

    tried: int
    too_short: int
    exact_rate: float | None
    rouge_l: float | None
    right_rate: float | None
    exact: tuple[str, ...]


def parted(text: str) -> tuple[str, str] | None:
    """Split a text after the first 60 % of its words; None when fewer than five words are left."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
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
    """Let the policy complete each prompt greedily, in at most `max_tokens` tokens; `scorer` judges the answers."""
    parts = [(example, found) for example in examples if (found := parted(task_text(example)))]
    texts: list[str] = []
    # Greedy: a text that is known by heart is the most likely one, and sampling would hide it.
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, greedy=True)
    for start in range(0, len(parts), BATCH):
        given = [beginning for _, (beginning, _) in parts[start : start + BATCH]]
        ids = tokenizer(given, add_special_tokens=False, verbose=False)["input_ids"]
        requests = [SampleRequest(prompt_T=np.asarray(row, dtype=np.int64), seeds_G=(0,)) for row in ids]
        for (sample,) in backend.sample(requests, params):
            texts.append(str(tokenizer.decode(sample.tokens_T, skip_special_tokens=True)))
    scores = scorer([(example, text) for (example, _), text in zip(parts, texts, strict=True)]) if parts else ()
    exact, overlaps, right = list[str](), list[float](), 0
    for (example, (_, rest)), text, timed in zip(parts, texts, scores, strict=True):
        wanted = words_of(rest)
        written = words_of(text)[: len(wanted)]
        overlaps.append(rouge_l(wanted, written))
        exact += [example.id] if written == wanted else []
        right += timed.score.value is not None and timed.score.value > correct_above
    tried = len(parts)
    return ProbeReport(
        tried=tried,
        too_short=len(examples) - tried,
        exact_rate=len(exact) / tried if tried else None,
        rouge_l=sum(overlaps) / tried if tried else None,
        right_rate=right / tried if tried else None,
        exact=tuple(exact),
    )


def rouge_l(wanted: Sequence[str], written: Sequence[str]) -> float:
    """Return ROUGE-L (Lin 2004), the F1 of the longest common subsequence: 2 LCS / (wanted + written words); 0 to 1."""
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
PROBED = 64  # prompts that the model is given, unless --examples says otherwise
SHOWN = 10
DRAW = Seeds(0)  # the same prompts whatever the run's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContaminationReport:
    """Every set against the training data, and the model's completions; `allowed` is the accepted share of a set."""

    sets: tuple[Contamination, ...]
    probes: dict[str, ProbeReport]
    allowed: float

    @property
    def ok(self) -> bool:
        rates: list[float | None] = [each.rate for each in self.sets]
        rates += [each.exact_rate for each in self.probes.values()]
        return all(rate is None or rate <= self.allowed for rate in rates)

    def as_data(self) -> dict[str, Any]:
        probes = {name: asdict(each) for name, each in self.probes.items()}
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
    """Load the data as a run does and compare every evaluated set with it; `say` gets the cost of completions first."""
    context = PluginContext(
        config=config,
        seeds=Seeds.from_config(config.training.seed),
        plugins=plugins,
        tokenizer=load_tokenizer(config, plugins),
    )
    tasks = load_tasks(context)
    with closing(tasks.verifier), _evaluated(tasks, context) as sets:
        if not sets:
            what, fix = "nothing is evaluated, so nothing can be contaminated", "set [eval.sets], or [eval] examples"
            raise ConfigError(Problem(code="eval.no-examples", where=config.place("eval.examples"), what=what, fix=fix))
        indices = [HeldOutIndex.of(name, found, words=words) for name, (found, _) in sets.items()]
        found = contamination(indices, (prompt.example for prompt in tasks.pool.train))
        probes = _probed(sets, context, examples or PROBED, open_backend, say) if open_backend else {}
    return ContaminationReport(sets=found, probes=probes, allowed=allowed)


def report_lines(report: ContaminationReport) -> Iterator[str]:
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
        yield f"{name}: {tried.tried} prompts, of which the model was given the first {GIVEN_SHARE:.0%}"
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
    sets: dict[str, _Set] = {}
    if tasks.pool.held_out:
        sets[HELD_OUT] = [prompt.example for prompt in tasks.pool.held_out], tasks.verifier
    evaluation = context.plugins.notify("retrain_evaluation", context=context, tasks=tasks)
    try:
        # The evaluation of `use/evaluate` has sets; another plugin's need not.
        for each in getattr(evaluation, "sets", ()):
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
