"""What life-cycle hooks may look at: read-only views of the run, of a scored step and of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.config.resolved import Config
from retrain.types import Group, TrainBatch

if TYPE_CHECKING:
    from retrain.plugins.protocols import Backend


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunView:
    """A run: its configuration, label, folder, seed and backend (look, do not touch)."""

    config: Config
    condition: str
    folder: Path
    seed: int
    first_step: int
    backend: Backend


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
