"""Which groups can teach anything, and why the others cannot; decided on raw scores."""

from __future__ import annotations

from enum import StrEnum

from retrain.kernel.types import Group, Outcome

CORRECT_ABOVE = 0.5  # a score above this counts as a right answer, everywhere


class GroupStatus(StrEnum):
    """Why a group is, or is not, informative."""

    INFORMATIVE = "informative"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    TIED = "all same"  # equal scores of a verifier that grades in steps
    NO_VERDICT = "no verdict"  # fewer than two completions have a score


def verdicts(group: Group) -> list[float]:
    """The scores of a group's completions that have one, in order."""
    return [score.value for score in group.scores if score.outcome is Outcome.SCORED and score.value is not None]


def num_correct(group: Group) -> int:
    """How many completions of the group are right."""
    return sum(value > CORRECT_ABOVE for value in verdicts(group))


def group_status(group: Group) -> GroupStatus:
    """INFORMATIVE unless all scores are exactly equal or fewer than two completions have one."""
    values = verdicts(group)
    if len(values) < 2:
        return GroupStatus.NO_VERDICT
    if any(value != values[0] for value in values):
        return GroupStatus.INFORMATIVE
    if values[0] >= 1.0:
        return GroupStatus.ALL_RIGHT
    return GroupStatus.ALL_WRONG if values[0] <= 0.0 else GroupStatus.TIED
