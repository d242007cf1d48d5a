"""Loads a base model and attaches the adapter: our own decoder for the Llama family, transformers' for the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from retrain.api import Config, ConfigError, PhaseProgress, Problem
from retrain_local.locate import Source
from retrain_local.model.architecture import read_architecture
from retrain_local.model.dtype import trained_dtype
from retrain_local.model.model_files import open_folder
from retrain_local.model.pair import Lora, Pair, Placement
from retrain_local.model.quantised import FP8, fp8_refusal
from retrain_local.options import ModelKeys

log = logging.getLogger("retrain")


def create_pair(
    config: Config,
    source: Source,
    *,
    trainer_device: torch.device,
    sampler_devices: Sequence[torch.device] = (),
    sampler_dtype: torch.dtype | None = None,
    samples: bool = True,
    seed: int,
    role: str = "train model",
    mesh: Any = None,
    progress: PhaseProgress | None = None,
) -> Pair:
    """Load the base once, from safetensors only, attach LoRA to every linear layer except the head, and publish it.

    With [model] lora_rank = 0 there is no adapter: all weights are trained, and sharded over a `mesh` if there is one.
    One sampler is made for each of `sampler_devices`, in `sampler_dtype`; both default to the trainer's, and
    float8_e4m3fn quantises the matrices. None is made without `samples`. `role` is what the console calls the model.
    ConfigError when the model cannot be loaded completely or cannot be computed exactly; BackendError when it does not
    fit on a device.
    """
    log.info("Loading %s: %s on %s...", role, config.model.model, trainer_device)
    rank = config.model.lora_rank
    kinds = {name: config.value(f"lora.{name}", False) for name in ("rslora", "dora")}
    lora = Lora(rank=rank, alpha=config.lora.alpha or 2 * rank, seed=seed, name=source.path, **kinds)
    samplers = (tuple(sampler_devices) or (trainer_device,)) if samples else ()
    place = replace(
        _placement(config, trainer_device, samplers, sampler_dtype), mesh=mesh, progress=progress or PhaseProgress()
    )
    folder = open_folder(config, source)
    with folder.refusals(trainer_device):
        architecture = read_architecture(folder.document)
        if architecture is not None and not rank:
            from retrain_local.model.full_pair import create_full_pair

            pair = create_full_pair(folder, architecture, place)
        elif architecture is not None and not lora.dora:
            from retrain_local.model.llama_pair import create_llama_pair

            pair = create_llama_pair(folder, architecture, lora, place)
        elif not rank:
            from retrain_local.model.hf_full import create_hf_full_pair  # transformers and PEFT: seconds to import

            pair = create_hf_full_pair(folder, place)
        else:
            from retrain_local.model.hf_model import create_hf_pair  # likewise

            pair = create_hf_pair(folder, lora, place)
    pair.publish()
    return pair


def _placement(
    config: Config, trainer: torch.device, samplers: tuple[torch.device, ...], dtype: torch.dtype | None
) -> Placement:
    trainer_dtype = trained_dtype(config, trainer)
    is_quantised = dtype == FP8
    if is_quantised and (why := next(filter(None, map(fp8_refusal, samplers)), None)):
        where, fix = config.place("inference.dtype"), 'set it to "auto" or "bf16"'
        raise ConfigError(Problem(where=where, what="fp8 cannot be used for sampling here", why=why, fix=fix))
    return Placement(
        trainer=trainer,
        trainer_dtype=trainer_dtype,
        samplers=samplers,
        sampler_dtype=trainer_dtype if dtype is None or is_quantised else dtype,
        is_quantised=is_quantised,
        quantize=config.table("model", ModelKeys).quantize,
    )
