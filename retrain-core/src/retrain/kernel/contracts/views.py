"""What life-cycle hooks receive: read-only views of the run, of a scored step and of an evaluation."""

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
