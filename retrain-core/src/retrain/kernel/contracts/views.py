"""What life-cycle hooks receive: read-only views of the run, of a scored step and of an evaluation; and a watcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """The scored groups of a step, and the rows about to be trained; None when nothing is."""

    step: int
    groups: tuple[Group, ...]
    batch: TrainBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalView:
    """The scores of an evaluation: those of each example's completions, and the cluster of each example."""

    scores_EG: Sequence[Sequence[Score]]
    correct_above: float
    clusters_E: Sequence[str]


class Watcher:
    """Base of what `retrain_watch_run` returns; override what is needed. Hooks work in it too, each with `hookimpl`.

    State of one run belongs in this object, never in a module.
    """

    def phase(self, step: int, phase: str) -> None:
        """The run enters `sampling`, `scoring`, `training`, `recording`, `eval` or `checkpoint`."""

    def step_line(self, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Fields to add to the step's line, which is complete (evaluation and times included) and about to be written.

        Once per step. A watcher that judges the step (health) does so here, so that its finding goes into the line.
        """
        return None

    def describe_run(self, run: RunView) -> Mapping[str, Any] | None:
        """Entries to add to `run.json`, as JSON: `{"capacity": {...}}`.

        Called before the first step and when the run is over: the second result replaces the first. An exception is
        logged and ends nothing.
        """
        return None
