"""Which groups carry a training signal, and why the others do not; decided on raw scores."""

from __future__ import annotations

from retrain.kernel.informative import GroupStatus, values_of
from retrain.kernel.types import Group, Outcome


def group_status(group: Group) -> GroupStatus:
    """INFORMATIVE unless all scores are exactly equal or fewer than two completions have one.

    Decided on raw scores, without those of completions that a shaper left without a verdict.
    """
    pairs = zip(group.raw_scores, group.scores, strict=True)
    values = values_of(raw for raw, score in pairs if score.outcome is Outcome.SCORED)
    if len(values) < 2:
        return GroupStatus.NO_VERDICT
    if any(value != values[0] for value in values):
        return GroupStatus.SURPLUS if group.is_surplus else GroupStatus.INFORMATIVE
    if values[0] >= 1.0:
        return GroupStatus.ALL_RIGHT
    return GroupStatus.ALL_WRONG if values[0] <= 0.0 else GroupStatus.TIED
