"""Views of a run and its steps for hooks, watchers and pacers; and the contracts of watchers and pacers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.config.resolved import Config
from retrain.kernel.types import Capabilities, Group, Score, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunView:
    """A run: its configuration, label, folder and seed, the step it begins with, its backend's capabilities.

    `manifest` is the content of `run.json` at the beginning of the run, secrets hidden.
    """

    config: Config
    condition: str
    folder: Path
    seed: int
    first_step: int
    capabilities: Capabilities
    manifest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupsView:
    """The scored groups of a step, and the rows about to be trained, if any."""

    step: int
    groups: tuple[Group, ...]
    batch: TrainBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalView:
    """The scores of each example's completions in an evaluation, and the cluster of each example."""

    scores_EG: Sequence[Sequence[Score]]
    correct_above: float
    clusters_E: Sequence[str]


class Watcher:
    """Base of the objects that `retrain_watch_run` returns. Hooks work in it too, each with `hookimpl`.

    State of one run belongs in this object, never in a module.
    """

    def phase(self, step: int, phase: str) -> None:
        """The run enters `sampling`, `scoring`, `training`, `recording`, `eval` or `checkpoint`."""

    def step_line(self, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Fields to add to the step's line, complete (evaluation and times included) and about to be written.

        Once per step. A watcher that judges the step (health) does so here, so that its finding goes into the line.
        """
        return None

    def describe_run(self, run: RunView) -> Mapping[str, Any] | None:
        """Entries to add to `run.json`, as JSON: `{"capacity": {...}}`.

        Called before the first step and when the run is over; the second result wins. An exception is only logged.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceView:
    """View that a pacer gets after a step.

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

    def restore(self, state: Mapping[str, Any]) -> None: ...
