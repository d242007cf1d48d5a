"""Which groups carry a training signal, and why the others do not; decided on raw scores."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.kernel.types import Group, GroupStatus, Outcome, values_of


def group_status(group: Group) -> GroupStatus:
    """INFORMATIVE unless all scores are exactly equal or fewer than two completions have one.

    Decided on raw scores, without those of completions that a shaper left without a verdict.
    """
    pairs = zip(group.raw_scores, group.scores, strict=True)
    status = status_of(values_of(raw for raw, score in pairs if score.outcome is Outcome.SCORED))
    return GroupStatus.SURPLUS if status is GroupStatus.INFORMATIVE and group.is_surplus else status


def status_of(values: Sequence[float]) -> GroupStatus:
    """The status of a group with these scores."""
    if len(values) < 2:
        return GroupStatus.NO_VERDICT
    if any(value != values[0] for value in values):
        return GroupStatus.INFORMATIVE
    if values[0] >= 1.0:
        return GroupStatus.ALL_RIGHT
    return GroupStatus.ALL_WRONG if values[0] <= 0.0 else GroupStatus.TIED
