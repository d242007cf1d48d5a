"""The published policy, as the local backend shares it with an engine."""

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

    `sampler` is a `retrain_local.decoder.Decoder`, None once the backend is closed; `version` counts the optimizer
    steps in it. Engines that run elsewhere load `model_path` (folder or hub id of the base model), write the adapter
    with `save_adapter`, and compare the log-probabilities they sample with against `logprobs`, which come from the
    model being trained. `limits` are the sizes that sampling has settled on.
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
