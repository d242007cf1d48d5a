"""The policy twice: the decoder that is trained, and those that sample what was last published."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrain.api import Config, ConfigError, Problem
from retrain_local.decoder import Decoder, TrainedDecoder
from retrain_local.locate import Source
from retrain_local.model.adapter import file_names
from retrain_local.model.architecture import read_architecture
from retrain_local.model.folder import open_folder
from retrain_local.model.quantised import FP8, fp8_refusal

log = logging.getLogger("retrain")


class Publish(Protocol):
    """Hands the adapter over to the sampler, in memory."""

    def __call__(self, adapter: Mapping[str, Tensor] | None = None) -> None:
        """Sample with the trained adapter as it is now, or with a given one of the same names as `Pair.adapter`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Training changes nothing of what the samplers compute before `publish`, which serves all of them.

    `parameters` are what is trained, by PEFT's names, in a fixed order; they are changed in place only. `total` counts
    all parameters, those of the adapter included.
    """

    trained: TrainedDecoder
    samplers: tuple[Decoder, ...]
    parameters: Mapping[str, nn.Parameter]
    total: int
    eos_ids: frozenset[int]
    adapter_config: Mapping[str, Any]
    publish: Publish

    @property
    def sampler(self) -> Decoder:
        """The first of them."""
        return self.samplers[0]

    @property
    def adapter(self) -> dict[str, Tensor]:
        """The trained tensors, not copied, by their names in adapter_model.safetensors."""
        return {name: p.detach() for name, p in file_names(self.parameters).items()}

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Every end-of-sequence id of the model's generation config, and the tokenizer's."""
        own = getattr(tokenizer, "eos_token_id", None)
        return self.eos_ids if own is None else self.eos_ids | {int(own)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the decoders live; frozen weights are shared where device and dtype agree, and copied where they do not.

    `is_quantised` = samplers multiply with 8-bit copies of the matrices.
    """

    trainer: torch.device
    trainer_dtype: torch.dtype
    samplers: tuple[torch.device, ...]
    sampler_dtype: torch.dtype
    is_quantised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """What the adapter is: A is drawn from `seed` alone, `name` is what adapter_config.json calls the base."""

    rank: int
    alpha: int
    seed: int
    name: str


def create_pair(
    config: Config,
    source: Source,
    *,
    trainer_device: torch.device,
    sampler_devices: Sequence[torch.device] = (),
    sampler_dtype: torch.dtype | None = None,
    seed: int,
) -> Pair:
    """Load the base once, from safetensors only, attach LoRA to every linear layer but the head, and publish it.

    There is one sampler for each of `sampler_devices`, in `sampler_dtype`, both the trainer's unless given;
    float8_e4m3fn quantises matrices. ConfigError when the model cannot be loaded completely or not be served exactly;
    BackendError when a device is too small for it.
    """
    log.info("Loading train model: %s on %s...", config.model.model, trainer_device)
    rank = config.model.lora_rank
    lora = Lora(rank=rank, alpha=config.lora.alpha or 2 * rank, seed=seed, name=source.path)
    place = _placement(config, trainer_device, tuple(sampler_devices) or (trainer_device,), sampler_dtype)
    folder = open_folder(config, source)
    with folder.refusals(trainer_device):
        architecture = read_architecture(folder.document)
        if architecture is not None:
            from retrain_local.model.native import create_native

            pair = create_native(folder, architecture, lora, place)
        else:
            from retrain_local.model.hf_model import create_hosted  # transformers and PEFT: seconds to import

            pair = create_hosted(folder, lora, place)
    pair.publish()
    return pair


def _placement(
    config: Config, trainer: torch.device, samplers: tuple[torch.device, ...], dtype: torch.dtype | None
) -> Placement:
    trainer_dtype = torch.float32 if trainer.type == "cpu" else torch.bfloat16
    is_quantised = dtype == FP8
    if is_quantised and (why := next(filter(None, map(fp8_refusal, samplers)), None)):
        where, fix = config.place("inference.dtype"), 'set it to "auto" or "bf16"'
        raise ConfigError(Problem(where=where, what="fp8 cannot be sampled with here", why=why, fix=fix))
    return Placement(
        trainer=trainer,
        trainer_dtype=trainer_dtype,
        samplers=samplers,
        sampler_dtype=trainer_dtype if dtype is None or is_quantised else dtype,
        is_quantised=is_quantised,
    )
