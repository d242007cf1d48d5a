"""The policy as a pair: the decoder being trained, and decoders that sample the published adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrain.api import PhaseProgress
from retrain_local.decoder import Decoder, TrainedDecoder
from retrain_local.model.adapter import file_names
from retrain_local.model.model_folder import ModelFiles


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

    `is_quantised`: samplers use 8-bit copies of the matrices. `quantize` is `[model] quantize`, of both sides.
    With a `mesh`, a `torch.distributed.DeviceMesh`, what is trained is sharded over it. `progress` counts
    the tensors that are loaded.
    """

    trainer: torch.device
    trainer_dtype: torch.dtype
    samplers: tuple[torch.device, ...]
    sampler_dtype: torch.dtype
    is_quantised: bool
    quantize: str = "none"
    mesh: Any = None
    progress: PhaseProgress = field(default_factory=PhaseProgress)

    @property
    def is_stacked(self) -> bool:
        """Whether samplers keep A below the matrix that it belongs to: on GPUs, where launches cost."""
        return bool(self.samplers) and not self.is_quantised and all(device.type == "cuda" for device in self.samplers)


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
