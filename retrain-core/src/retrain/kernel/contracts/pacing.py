"""The contract of a pacer, which sets the number of prompts of each step from the measurements of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceView:
    """What a pacer sees after a step.

    `sampled_tokens` counts all completions, trained or not; `step_time_s` excludes evaluation and checkpoints.
    `has_trained` is False when the step had no informative group or was rejected, so that its time means little. With
    `out_of_memory` nothing was counted or changed: the same step is tried again with the next batch size.
    """

    step: int
    batch_size: int
    group_size: int
    sampled_tokens: int = 0
    step_time_s: float = 0.0
    has_trained: bool = False
    out_of_memory: bool = False


class Pacer(Protocol):
    """Sets the number of prompts of every step; it decides by measured times, so no seed reproduces its run."""

    def batch_size(self, step: int) -> int:
        """Prompts of this step, at least 1; constant until the next `observe`."""

    def observe(self, view: PaceView) -> None:
        """Learn from a step. After `out_of_memory` the batch size must shrink, or the run ends."""

    def metrics(self) -> Mapping[str, float | str | bool]:
        """Extra fields for the line of the step last observed."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
