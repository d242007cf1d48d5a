"""Credit: from the scored groups of a step to one advantage per sampled token, and the parts it is made of.

`_G` one entry per completion of a group, `_A` one per action token of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrain.kernel.informative import GroupStatus
from retrain.kernel.types import Floats, Group, Mask, Tokens, TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm asks of the sampler, known before anything loads."""

    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCredit:
    """Credit of one completion: `advantages_A` and, with a planning detector, `planning_A`, per action token."""

    advantages_A: Floats
    planning_A: Mask | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """Credit of one step.

    `statuses_P[p]` says whether group p is informative, and why not. `tokens_PG[p][g]` is the credit of completion g of
    group p, None where the verifier reached no verdict. `rows` are what is trained: those of the informative groups.
    `metrics` go into the step's line.
    """

    statuses_P: tuple[GroupStatus, ...]
    tokens_PG: tuple[tuple[TokenCredit | None, ...], ...]
    rows: tuple[TrainRow, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Algorithm(Protocol):
    """The one contract of credit: a run has one, and the kernel knows nothing of how it works.

    `labels` are text fields that every line of `metrics.jsonl` carries; `condition` must be among them: the label of
    the run in records and on the console.
    """

    needs: Needs
    labels: Mapping[str, str]

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        """Credit for a step's scored groups; CreditError on wrong shapes or numbers that are not finite."""

    def observe(self, step: int, groups: Sequence[Group], credit: Credit) -> None:
        """Learn from a step, after its line's fields are known; schedules with state move here."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""


class PlanningDetector(Protocol):
    """Marks the tokens that plan rather than execute."""

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, of its length; ids are action tokens only. Called once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerView:
    """What a controller sees after a step: rates over all completions, pooled variance over execution tokens.

    `correct_rate` and `execution_variance` are None when there was nothing to measure.
    """

    step: int
    correct_rate: float | None
    execution_variance: float | None


class Controller(Protocol):
    """A schedule with state: one number per step."""

    def value(self, step: int) -> float:
        """The number for this step, in [0, 1], asked before the step's observation."""

    def observe(self, view: ControllerView) -> None:
        """Learn from a finished step."""

    def metrics(self) -> Mapping[str, float | bool]:
        """Extra fields for the step's line in `metrics.jsonl`."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
