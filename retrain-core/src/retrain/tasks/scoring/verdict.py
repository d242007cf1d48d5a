"""Turns a reward's return value into one of the three outcomes of a score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrain.kernel.contracts.tasks import Reward
from retrain.kernel.types import Example, Outcome, Score

UNIQUE_SCORES = "reward_unique_fraction_mean"  # of the step's groups, not of a part
# Cut, because it is stored with every completion.
MAX_DETAIL = 1000


def verdict(answer: Any) -> Score:
    """Return the answer as a score: numbers are what `float()` takes; text, arrays, NaN and None are failures."""
    try:
        if isinstance(answer, Score):
            return _validated(answer)
        is_single = getattr(answer, "ndim", None) in (None, 0) and not isinstance(answer, str | bytes | bytearray)
        if not is_single or not hasattr(answer, "__float__"):
            text = f" {answer!r}"[:81] if isinstance(answer, str | bytes) else ""
            shown = "None" if answer is None else f"{type(answer).__name__}{text}"
            return Score.failed(f"the reward returned {shown}, not a number or a Score")
        if not math.isfinite(value := float(answer)):
            return Score.failed(f"the reward returned {value}, not a finite number")
        return Score.of(value)
    except (ValueError, TypeError, OverflowError) as error:
        return Score.failed(f"the reward returned an invalid score: {type(error).__name__}: {error}"[:MAX_DETAIL])


def combined(scores: Sequence[Score], names: Sequence[str], weights: Sequence[float]) -> Score:
    """Combine several rewards: value = sum of weight * value.

    If one part failed, the whole failed; otherwise, if one has no verdict, neither has the whole. `parts` holds the
    unweighted value of every reward that has one, by name.
    """
    if len(scores) == 1:
        score, weight = scores[0], weights[0]
        if score.value is None or weight == 1.0:
            return score
        if not math.isfinite(value := weight * score.value):
            return Score.failed("the weighted reward is not finite")
        return Score(outcome=score.outcome, value=value, detail=score.detail, parts=score.parts)
    parts = {name: score.value for name, score in zip(names, scores, strict=True) if score.value is not None}
    for outcome in (Outcome.FAILED, Outcome.NO_VERDICT):
        detail = _details(scores, names, outcome)
        if detail:
            return Score(outcome=outcome, detail=detail, parts=parts)
    value = sum(weight * (score.value or 0.0) for weight, score in zip(weights, scores, strict=True))
    if not math.isfinite(value):
        return Score(outcome=Outcome.FAILED, detail="the weighted sum of the rewards is not finite", parts=parts)
    return Score(outcome=Outcome.SCORED, value=value, detail=_details(scores, names, Outcome.SCORED), parts=parts)


def part_means(scores: Iterable[Score]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward_{name}_mean": math.fsum(each) / len(each) for name, each in values.items()}


def part_fields(fields: Iterable[str], prefix: str = "") -> dict[str, str]:
    """Return the `part_means` among `fields` by the part's name; `prefix` is `eval_` for the held-out ones."""
    head, tail = f"{prefix}reward_", "_mean"
    found = [field for field in fields if field.startswith(head) and field.endswith(tail) and field != UNIQUE_SCORES]
    return {field.removeprefix(head).removesuffix(tail): field for field in sorted(found)}


class Scorers:
    """All synchronous rewards of a run: the object that a scoring process holds."""

    def __init__(self, rewards: Mapping[int, Reward]) -> None:
        self.rewards = dict(rewards)

    def prepare(self) -> None:
        for reward in self.rewards.values():
            prepare = getattr(reward, "prepare", None)
            if prepare is not None:
                prepare()

    def score(self, number: int, example: Example, text: str) -> Score:
        return verdict(self.rewards[number].score(example, text))


def _validated(score: Score) -> Score:
    outcome = Outcome(score.outcome)
    detail = str(score.detail)[:MAX_DETAIL]
    parts = {str(name): float(value) for name, value in score.parts.items()}
    if not all(math.isfinite(value) for value in parts.values()):
        return Score.failed(f"the reward returned parts that are not finite: {parts}"[:MAX_DETAIL])
    if outcome is not Outcome.SCORED:
        return Score(outcome=outcome, detail=detail, parts=parts)
    if score.value is None:
        return Score.failed("the reward returned a Score without a value")
    inner = verdict(score.value)
    if inner.value is None:
        return inner
    return Score(outcome=outcome, value=inner.value, detail=detail, parts=parts)


def _details(scores: Sequence[Score], names: Sequence[str], outcome: Outcome) -> str:
    pairs = zip(names, scores, strict=True)
    details = [f"{name}: {score.detail}" for name, score in pairs if score.outcome is outcome]
    if outcome is Outcome.SCORED:
        details = [line for line in details if not line.endswith(": ")]
    return "; ".join(details)[:MAX_DETAIL]
