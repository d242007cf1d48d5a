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
    """Copies the adapter to the samplers, in memory."""

    def __call__(self, adapter: Mapping[str, Tensor] | None = None) -> None:
        """Sample with the trained adapter as it is now, or with a given one of the same names as `Pair.adapter`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """A trained decoder and its samplers; training affects no sampler before `publish`, which updates all of them.

    `parameters` are the trained ones, by PEFT's names and in a fixed order; they are only changed in place. `total`
    counts all parameters, those of the adapter included. `files` are those of the model where all weights are trained:
    then `parameters` have transformers' names, and there is no adapter.
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
        """The first sampler."""
        return self.samplers[0]

    @property
    def adapter(self) -> dict[str, Tensor]:
        """The trained tensors, not copied, by their names in the file of the adapter or of the model."""
        return {name: p.detach() for name, p in file_names(self.parameters).items()}

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Every end-of-sequence id of the model's generation config, and the tokenizer's.

        A tokenizer may have more tokens than the model's head. Those are never sampled, and vLLM refuses their ids.
        """
        own = getattr(tokenizer, "eos_token_id", None)
        ids = self.eos_ids if own is None else self.eos_ids | {int(own)}
        return frozenset(token for token in ids if token < self.trained.shape.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices and dtypes of the decoders; frozen weights are shared where both agree, and copied elsewhere.

    `quantize` is `[model] quantize`, of both sides.
    With a `mesh`, a `torch.distributed.DeviceMesh`, what is trained is sharded over it. `progress` counts
    the tensors that are loaded.
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
        """Whether samplers keep A below the matrix that it belongs to: on GPUs, where launches cost."""
        return bool(self.samplers) and all(device.type == "cuda" for device in self.samplers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Settings of the adapter: A is initialised from `seed` alone, `name` is the base in adapter_config.json.

    `rslora` divides alpha by the root of the rank (arXiv:2312.03732), `dora` trains magnitudes too (arXiv:2402.09353).
    """

    rank: int
    alpha: int
    seed: int
    name: str
    rslora: bool = False
    dora: bool = False


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
