"""What became of every token that a run drew: one cause for each, so that they add up.

The cause is the first thing that kept a completion out of an optimizer step, in the order in which a step decides:
its own score, its length, its group, then what befell the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from retrain.credit.group_status import status_of
from retrain.inspect.signal.drawn import OUTCOMES, Drawn
from retrain.kernel.informative import GroupStatus
from retrain.kernel.types import Floats, Outcome


class Cause(StrEnum):
    """What tokens were good for, or why they were good for nothing."""

    TAUGHT = "taught"  # in a trained row, with credit that is not zero
    ZERO_CREDIT = "trained, zero credit"  # in a trained row: masked, or an advantage of 0; in the loss's denominator
    TRAINED = "trained, credit not stored"  # in a trained row of a step without a token file
    ALL_RIGHT = "group all right"
    ALL_WRONG = "group all wrong"
    TIED = "group all same"  # equal scores strictly between 0 and 1
    TOO_FEW = "group with one verdict"  # judged, but nothing in its group to compare with
    TRUNCATED = "truncated"  # left out by [training] overlong
    NO_VERDICT = "no verdict"
    FAILED = "verifier failed"
    SURPLUS = "surplus of refill"
    REJECTED = "step rejected"
    NO_UPDATE = "control no_update"
    OTHER = "not trained"  # informative, and the records do not say why it was left out
    UNRECORDED = "no record"  # counted by the step's line, and no completion of the step is stored
    EVALUATION = "evaluation"


_OF_STATUS = {
    GroupStatus.ALL_RIGHT: Cause.ALL_RIGHT,
    GroupStatus.ALL_WRONG: Cause.ALL_WRONG,
    GroupStatus.TIED: Cause.TIED,
    GroupStatus.NO_VERDICT: Cause.TOO_FEW,
}
_OF_OUTCOME = {Outcome.NO_VERDICT: Cause.NO_VERDICT, Outcome.FAILED: Cause.FAILED}
CAUSES = tuple(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step's line says that its completions do not: `is_rejected` before its first update.

    `sampled_tokens` is None where it was rejected while it was sampled.
    """

    sampled_tokens: int | None = None
    is_rejected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the configuration says: `is_no_update`, and `leaves_truncated` by [training] overlong."""

    steps: Mapping[int, StepFacts] = field(default_factory=dict)
    is_no_update: bool = False
    leaves_truncated: bool = False


def causes_of(drawn: Drawn, facts: RunFacts) -> tuple[np.ndarray, np.ndarray]:
    """The cause of each completion as its position in CAUSES, TRAINED for all that were; which groups can teach.

    A group can teach when its raw rewards differ, truncated and dropped ones aside: INFORMATIVE, or surplus.
    """
    cause_N = np.full(drawn.step_N.size, CAUSES.index(Cause.TRAINED))
    teaches_G = np.zeros(drawn.starts_G.size, dtype=np.bool_)
    values_N = np.where(np.isnan(drawn.credited_N), np.nan, drawn.rewards_N)
    for number, group in enumerate(drawn.groups()):
        status = _status(values_N[group])
        teaches_G[number] = status is GroupStatus.INFORMATIVE
        is_trained_G = drawn.is_trained_N[group]
        if is_trained_G.all():
            continue
        reason = None if is_trained_G.any() else _OF_STATUS.get(status)
        step = facts.steps.get(int(drawn.step_N[group.start]), StepFacts())
        for at in (group.start + np.flatnonzero(~is_trained_G)).tolist():
            cause_N[at] = CAUSES.index(_cause(drawn, at, reason, step, facts))
    return cause_N, teaches_G


def _status(values_G: Floats) -> GroupStatus:
    return status_of(values_G[~np.isnan(values_G)].tolist())


def _cause(drawn: Drawn, at: int, of_group: Cause | None, step: StepFacts, facts: RunFacts) -> Cause:
    """Why a completion was not trained; `of_group` is the reason why none of its group was, if there is one."""
    outcome = OUTCOMES[drawn.outcome_N[at]]
    if outcome in _OF_OUTCOME:
        return _OF_OUTCOME[outcome]
    if np.isnan(drawn.credited_N[at]):
        return Cause.TRUNCATED
    if of_group:
        return of_group
    if drawn.is_surplus_N[at]:
        return Cause.SURPLUS
    if facts.leaves_truncated and drawn.is_truncated_N[at]:
        return Cause.TRUNCATED
    if facts.is_no_update:
        return Cause.NO_UPDATE
    return Cause.REJECTED if step.is_rejected else Cause.OTHER
