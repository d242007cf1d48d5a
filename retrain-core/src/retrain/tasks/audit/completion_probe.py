"""Whether a model knows the held-out prompts by heart: it completes what the first 60 % of each begin.

After Wu et al. 2025 (arXiv:2507.10532): Qwen2.5-Math-7B completes 54.6 % of MATH-500 so, and none of the problems that
were written after it was trained. As there, decoding is greedy and the prompt stands alone, without a chat template.
Other than there, a rest of fewer than five words is not tried, since a good guess would complete it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.verifier import TimedScore
from retrain.kernel.types import Example, SampleRequest, SamplingParams
from retrain.tasks.audit.contamination import task_text, words_of

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
