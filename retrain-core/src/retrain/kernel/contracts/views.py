"""What life-cycle hooks may look at: read-only views of the run, of a scored step and of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.types import Capabilities, Group, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunView:
    """A run: its configuration, label, folder and seed, the step it begins with, what its backend promises."""

    config: Config
    condition: str
    folder: Path
    seed: int
    first_step: int
    capabilities: Capabilities


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupsView:
    """The scored groups of a step."""

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchView:
    """The rows that are about to be trained."""

    step: int
    batch: TrainBatch
