"""What the default algorithm may be built with: a detector of planning tokens, and a controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retrain.kernel.types import Mask, Tokens


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
        """Continue from what `state` returned."""
