"""Whether a group carries a training signal, and why not; decided on raw scores."""

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
    return values_of(group.raw_scores)


def num_correct(group: Group) -> int:
    """How many completions of the group are correct."""
    return sum(value > group.correct_above for value in verdicts(group))


def values_of(scores: Iterable[Score]) -> list[float]:
    """The values of the scores that are verdicts."""
    return [score.value for score in scores if score.outcome is Outcome.SCORED and score.value is not None]
