"""What the local backend shares with an engine: the published policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from retrain.api import ActionRow, Floats
from retrain_local.memory import MemoryLimits


@dataclass(slots=True, kw_only=True, eq=False)
class LocalPolicy:
    """The policy as last published, a `retrain.api.Policy`.

    `sampler` is a `retrain_local.decoder.Decoder`, None once the backend is closed; `version` the number of optimizer
    steps in it. Engines that run elsewhere take `model_path` (folder or hub id of the base), write the adapter with
    `save_adapter`, and compare what they sample with `logprobs`, which are those of the model that is trained.
    """

    sampler: Any
    device: torch.device
    model_path: str
    stop_ids: frozenset[int]
    context_limit: int | None
    save_adapter: Callable[[Path], None]
    logprobs: Callable[[Sequence[ActionRow], float], list[Floats]]
    version: int = 0
    limits: MemoryLimits = field(default_factory=MemoryLimits)
