"""Credit: from the scored groups of a step to one advantage per sampled token.

`_G` one entry per completion of a group, `_A` one per action token of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrain.kernel.declared import Needs as Needs
from retrain.kernel.types import Floats, Group, GroupStatus, Mask, TrainRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCredit:
    """Credit of one completion: `advantages_A` and, with a planning detector, `planning_A`, per action token.

    `is_masked`: it is left out of the loss, and its `advantages_A` are 0.
    """

    advantages_A: Floats
    planning_A: Mask | None = None
    is_masked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """Credit of one step.

    `statuses_P[p]` is the status of group p. `tokens_PG[p][g]` is the credit of completion g of group p: zeros, and no
    planning token, where the verifier reached no verdict. `rows` are the rows to train, from the informative groups;
    `num_masked` others, of the groups `masked_groups`, were left out of the loss. `metrics` go into the step's line.
    `memo` is private to the algorithm and passed back to `observe`.
    """

    statuses_P: tuple[GroupStatus, ...]
    tokens_PG: tuple[tuple[TokenCredit, ...], ...]
    rows: tuple[TrainRow, ...]
    num_masked: int = 0
    masked_groups: tuple[int, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    memo: Any = None

    def trains(self, group: int) -> bool:
        """True for a group that is informative, or that an advantage of steps gave credit all the same."""
        is_informative = self.statuses_P[group] is GroupStatus.INFORMATIVE
        return is_informative or any(tokens.advantages_A.any() for tokens in self.tokens_PG[group])


class Shaper(Protocol):
    """Changes rewards between scoring and credit, by the length of completions, their divergence, ..."""

    def shape(self, step: int, groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """The same groups for credit, changed by `Group.shaped`, and fields for the step's line.

        Records keep the raw scores. A completion without a verdict stays without one. It changes no state: after a step
        ran out of memory, fewer groups are shaped again.
        """


class Algorithm(Protocol):
    """The one contract of credit: a run has one algorithm, and the kernel does not know how it works.

    `labels` are text fields of every line of `metrics.jsonl`; they must include `condition`, the label of the run.
    """

    @property
    def needs(self) -> Needs:
        """Requirements on the sampler."""

    @property
    def labels(self) -> Mapping[str, str]: ...

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        """Credit for a step's scored groups; CreditError on wrong shapes or non-finite numbers.

        It changes no state: after a step ran out of memory, credit is assigned again to fewer groups.
        """

    def observe(self, step: int, groups: Sequence[Group], credit: Credit) -> None:
        """Learn from a finished step, once per step that got credit; stateful schedules advance here."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; {} when there is nothing to save."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; ResumeError when it does not fit."""
