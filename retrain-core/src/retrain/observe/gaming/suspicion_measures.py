"""What a step looks like without a second verifier: lengths, entropy, n-grams, answers, credit on common tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.types import Completion, Floats, Group, Tokens
from retrain.tasks.prompt_expressions import expressions

NGRAM = 4  # tokens
BUCKETS = 2**15  # n-grams are counted by hash; those that share a bucket only hide each other
COMMON = 8  # token ids that are the format
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")

Counts = NDArray[np.float64]  # per bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A completion with a score: its group, and whether the reward calls it correct."""

    group: int
    example_group: Group
    completion: Completion
    is_paid: bool


def judged(groups: Sequence[Group]) -> list[Judged]:
    """The completions of a step's first round that the reward gave a score, in sampling order."""
    return [
        Judged(group=number, example_group=group, completion=each, is_paid=raw.value > group.correct_above)
        for number, group in enumerate(groups)
        for each, raw in zip(group.completions, group.raw_scores, strict=True)
        if raw.value is not None and not group.round
    ]


def mean_length(found: Sequence[Judged]) -> float:
    """Mean number of sampled tokens."""
    return float(np.mean([each.completion.num_actions for each in found]))


def mean_entropy(found: Sequence[Judged]) -> float:
    """Mean entropy of the action tokens (nats), or mean surprisal where a completion has no entropies."""
    total = count = 0.0
    for each in found:
        row, action_T = each.completion, each.completion.action_T
        values_T = -row.logprobs_T if row.entropies_T is None else row.entropies_T
        total, count = total + float(values_T[action_T].sum()), count + row.num_actions
    return total / count if count else 0.0


def ngram_buckets(tokens_A: Tokens) -> NDArray[np.int64]:
    """The buckets of a completion's n-grams, each once."""
    if tokens_A.size < NGRAM:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens_A.astype(np.uint64), NGRAM)
    hashed = np.zeros(len(windows), np.uint64)
    for column in windows.T:
        hashed = (hashed ^ column) * _MULTIPLIER
    found = ((hashed >> np.uint64(40)) % np.uint64(BUCKETS)).astype(np.int64)
    return np.array(sorted(set(found.tolist())), dtype=np.int64)  # np.unique imports what a run does not need


def ngram_shares(found: Sequence[Judged]) -> Counts:
    """Per bucket the share of completions that have one of its n-grams: the mean over groups of their shares."""
    by_group: dict[int, list[Judged]] = {}
    for each in found:
        by_group.setdefault(each.group, []).append(each)
    shares = np.zeros(BUCKETS)
    for members in by_group.values():
        for each in members:
            buckets = ngram_buckets(sampled(each.completion))
            shares[buckets] += 1.0 / (len(members) * len(by_group))
    return shares


def ngram_of(found: Sequence[Judged], bucket: int) -> list[int]:
    """The token ids of an n-gram in that bucket."""
    for each in found:
        tokens_A = sampled(each.completion)
        for start in range(tokens_A.size - NGRAM + 1):
            if ngram_buckets(tokens_A[start : start + NGRAM])[0] == bucket:
                return [int(token) for token in tokens_A[start : start + NGRAM]]
    return []


def answer_positions(found: Sequence[Judged]) -> list[float]:
    """Where in its text each answer begins: 0 at the beginning, 1 at the end. Nothing for texts without an answer."""
    return [place / len(each.completion.text) for each, place, _ in _answers(found)]


def repeats_prompt(found: Sequence[Judged]) -> float | None:
    """The share of answers that are an expression or a number of the prompt, and not the reference."""
    repeats = [_repeats(each.example_group, answer) for each, _, answer in _answers(found)]
    return sum(repeats) / len(repeats) if repeats else None


def common_tokens(found: Sequence[Judged]) -> list[int]:
    """The token ids that occur most often."""
    counts = Counter(token for each in found for token in sampled(each.completion).tolist())
    return sorted(counts, key=lambda token: (-counts[token], token))[:COMMON]


def format_credit(groups: Sequence[Group], credit: Credit, format_tokens: Sequence[int]) -> float | None:
    """The share of all positive credit of a step that is on these token ids; None without positive credit."""
    on_format = total = 0.0
    for group, tokens_G in zip(groups, credit.tokens_PG, strict=True):
        for completion, token_credit in zip(group.completions, tokens_G, strict=True):
            positive_A: Floats = np.maximum(token_credit.advantages_A, 0.0)
            total += float(positive_A.sum())
            on_format += float(positive_A[np.isin(sampled(completion), format_tokens)].sum())
    return on_format / total if total > 0.0 else None


def sampled(completion: Completion) -> Tokens:
    """The tokens that the policy sampled."""
    return completion.tokens_T[completion.action_T]


def _answers(found: Sequence[Judged]) -> Iterator[tuple[Judged, int, str]]:
    """Each answer and its place in the text: the last box, or the last number of a text without one."""
    for each in found:
        text = each.completion.text
        for last in [*_BOX.finditer(text)][-1:] or [*_NUMBER.finditer(text)][-1:]:
            yield each, last.start(), (last[1] if last.re is _BOX else last[0]).strip()


def _repeats(group: Group, answer: str) -> bool:
    prompt, reference = group.example.prompt, group.example.reference
    words = prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content", "")) for turn in prompt)
    said = "".join(answer.split())
    if not said or said == "".join(reference.split()):
        return False
    own = [*expressions(words, reference), *_NUMBER.findall(words)]
    return said in {"".join(each.split()) for each in own}
