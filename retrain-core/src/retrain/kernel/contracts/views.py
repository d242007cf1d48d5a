"""What life-cycle hooks receive: read-only views of the run, of a scored step and of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.types import Capabilities, Group, TrainBatch


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
    """The scored groups of a step."""

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchView:
    """The rows about to be trained."""

    step: int
    batch: TrainBatch
