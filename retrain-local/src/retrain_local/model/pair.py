"""The policy: the decoder being trained, the decoders that sample, and the published policy as an engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrain.api import ActionRow, Floats, PhaseProgress
from retrain_local.decoder import Decoder, TrainedDecoder
from retrain_local.memory.limits import MemoryLimits
from retrain_local.model.adapter import file_names
from retrain_local.model.model_files import ModelFiles


class Publish(Protocol):
    """Copies an adapter to the samplers: the current trained one, or one of the same names as `Pair.adapter`."""

    def __call__(self, adapter: Mapping[str, Tensor] | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """A trained decoder and its samplers; training affects no sampler before `publish` updates all of them.

    `parameters` are the trained ones, by PEFT's names and in a fixed order; they are only changed in place. `total`
    counts all parameters, including the adapter. With all weights trained, `files` describes the model's folder,
    `parameters` have transformers' names, and there is no adapter.
    """

    trained: TrainedDecoder
    samplers: tuple[Decoder, ...]
    parameters: Mapping[str, nn.Parameter]
    total: int
    eos_ids: frozenset[int]
    adapter_config: Mapping[str, Any]
    publish: Publish
    files: ModelFiles | None = None

    @property
    def sampler(self) -> Decoder:
        return self.samplers[0]

    @property
    def adapter(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in file_names(self.parameters).items()}

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        # A tokenizer may have more tokens than the head. These are never sampled, and vLLM refuses their ids.
        own = getattr(tokenizer, "eos_token_id", None)
        ids = self.eos_ids if own is None else self.eos_ids | {int(own)}
        return frozenset(token for token in ids if token < self.trained.shape.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices and dtypes of the decoders; frozen weights are shared where both agree, and copied where they do not.

    Trained weights are sharded over `mesh`, a `DeviceMesh`, if given. `progress` counts the tensors that are loaded.
    """

    trainer: torch.device
    trainer_dtype: torch.dtype
    samplers: tuple[torch.device, ...]
    sampler_dtype: torch.dtype
    quantize: str = "none"
    mesh: Any = None
    progress: PhaseProgress = field(default_factory=PhaseProgress)

    @property
    def is_stacked(self) -> bool:
        """True if samplers keep A below the rows of its matrix: on GPUs, where launches cost time."""
        return bool(self.samplers) and all(device.type == "cuda" for device in self.samplers)


@dataclass(slots=True, kw_only=True, eq=False)
class LocalPolicy:
    """The policy as last published, a `retrain.api.Policy`.

    `sampler` is a `retrain_local.decoder.Decoder`, None once the backend is closed; `version` counts the optimizer
    steps in it. Servers load `model_path` (folder or hub id of the base model), write the adapter with `save_adapter`,
    and compare their log-probabilities with `logprobs` of the model being trained.
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
