"""Credit: from the scored groups of a step to one advantage per sampled token.

`_G` one entry per completion of a group, `_A` one per action token of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrain.kernel.declared import Needs as Needs
from retrain.kernel.informative import GroupStatus
from retrain.kernel.types import Floats, Group, Mask, TrainRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCredit:
    """Credit of one completion: `advantages_A` and, with a planning detector, `planning_A`, per action token."""

    advantages_A: Floats
    planning_A: Mask | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """Credit of one step.

    `statuses_P[p]` says whether group p is informative, and why not. `tokens_PG[p][g]` is the credit of completion g of
    group p: zeros, and no planning token, where the verifier reached no verdict. `rows` are what is trained: those of
    the informative groups. `metrics` go into the step's line. `memo` is the algorithm's own, handed back to `observe`;
    nobody else reads it.
    """

    statuses_P: tuple[GroupStatus, ...]
    tokens_PG: tuple[tuple[TokenCredit, ...], ...]
    rows: tuple[TrainRow, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    memo: Any = None


class Algorithm(Protocol):
    """The one contract of credit: a run has one, and the kernel does not know how it works.

    `labels` are text fields that every line of `metrics.jsonl` carries; `condition` must be among them: the label of
    the run in records and on the console.
    """

    @property
    def needs(self) -> Needs:
        """What the sampler must return."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Names for records, the same throughout a run."""

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        """Credit for a step's scored groups; CreditError on wrong shapes or numbers that are not finite.

        It changes no state: a step that runs out of memory is assigned again with fewer groups.
        """

    def observe(self, step: int, groups: Sequence[Group], credit: Credit) -> None:
        """Learn from a finished step, once per step that got credit; schedules with state advance here."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; {} when there is nothing to keep."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; ResumeError when it does not fit."""
