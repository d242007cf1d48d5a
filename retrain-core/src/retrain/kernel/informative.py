"""Which groups carry a training signal, and why the others do not; decided on raw scores."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from retrain.kernel.types import Group, Outcome, Score


class GroupStatus(StrEnum):
    """Whether a group is informative, and why not."""

    INFORMATIVE = "informative"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    TIED = "all same"  # equal scores from a verifier that gives partial credit
    SURPLUS = "surplus"  # informative, and not trained: see `Group.is_surplus`
    NO_VERDICT = "no verdict"  # fewer than two completions have a score


def verdicts(group: Group) -> list[float]:
    """The raw scores of a group's completions that have one, in order."""
    return _values(group.raw_scores)


def num_correct(group: Group) -> int:
    """How many completions of the group are correct."""
    return sum(value > group.correct_above for value in verdicts(group))


def group_status(group: Group) -> GroupStatus:
    """INFORMATIVE unless all scores are exactly equal or fewer than two completions have one.

    Decided on raw scores, without those of completions that a shaper left without a verdict.
    """
    pairs = zip(group.raw_scores, group.scores, strict=True)
    values = _values(raw for raw, score in pairs if score.outcome is Outcome.SCORED)
    if len(values) < 2:
        return GroupStatus.NO_VERDICT
    if any(value != values[0] for value in values):
        return GroupStatus.SURPLUS if group.is_surplus else GroupStatus.INFORMATIVE
    if values[0] >= 1.0:
        return GroupStatus.ALL_RIGHT
    return GroupStatus.ALL_WRONG if values[0] <= 0.0 else GroupStatus.TIED


def _values(scores: Iterable[Score]) -> list[float]:
    return [score.value for score in scores if score.outcome is Outcome.SCORED and score.value is not None]
