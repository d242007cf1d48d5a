"""Loads the base model and attaches the adapter: the one door through which a model of any architecture comes in.

The families of `architecture.FAMILIES` get the decoder of this backend; others go through transformers.
"""

from __future__ import annotations

import logging
import timeit
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from retrain.api import Config, ConfigError, PhaseProgress, Problem
from retrain_local.memory.sizes import AUTO_DTYPE
from retrain_local.model.adapter import Lora
from retrain_local.model.architecture import read_architecture
from retrain_local.model.model_files import Source, open_folder
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.qlora import silence_advice
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

    With [model] lora_rank = 0 all weights are trained, sharded over `mesh` if there is one. `sampler_devices` and
    `sampler_dtype` default to the trainer's. ConfigError when the model cannot be loaded completely or computed
    exactly, BackendError when it does not fit on a device.
    """
    log.info("Loading %s: %s on %s...", role, config.model.model, trainer_device)
    rank = config.model.lora_rank
    kinds = {name: config.value(f"lora.{name}", False) for name in ("rslora", "dora")}
    targets = tuple(config.value("lora.targets", [ALL_LINEAR]))
    lora = Lora(rank=rank, alpha=config.lora.alpha or 2 * rank, seed=seed, name=source.path, targets=targets, **kinds)
    trainer_dtype = trained_dtype(config, trainer_device)
    place = Placement(
        trainer=trainer_device,
        trainer_dtype=trainer_dtype,
        samplers=(tuple(sampler_devices) or (trainer_device,)) if samples else (),
        sampler_dtype=sampler_dtype or trainer_dtype,
        quantize=config.table("model", ModelKeys).quantize,
        mesh=mesh,
        progress=progress or PhaseProgress(),
    )
    folder = open_folder(config, source)
    with folder.refusals(trainer_device):
        architecture = read_architecture(folder.document)
        if architecture is not None and not rank:
            from retrain_local.model.full import create_full_pair

            shard: Any = None
            if mesh is not None:
                # FSDP takes seconds to import.
                from retrain_local.model.sharded import shard
            pair = create_full_pair(folder, architecture, place, shard)
        elif architecture is not None and not lora.dora and lora.targets == (ALL_LINEAR,):
            from retrain_local.model.llama import create_llama_pair

            pair = create_llama_pair(folder, architecture, lora, place)
        else:
            silence_advice()
            # Imported where needed: transformers and PEFT take seconds.
            from retrain_local.model.hf_model import create_hf_full_pair, create_hf_pair

            pair = create_hf_pair(folder, lora, place) if rank else create_hf_full_pair(folder, place)
    pair.publish()
    return pair


ALL_LINEAR = "all-linear"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BF16_CAPABILITY = 8, 0  # Ampere; older GPUs have no instructions for it
ROWS, WIDTH = 128, 512  # of the product that is timed: under a millisecond where bf16 is native
ROUNDS = 5


def trained_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return `[model] dtype` on this device; ConfigError when bf16 is slower than fp32 there."""
    name = config.table("model", ModelKeys).dtype
    is_slow = device.type == "cuda" and torch.cuda.get_device_capability(device) < BF16_CAPABILITY
    auto = "fp32" if is_slow else AUTO_DTYPE.get(device.type, "bf16")
    dtype, why = DTYPES[auto if name == "auto" else name], "it emulates bf16" if is_slow else None
    if device.type == "cpu" and dtype == torch.bfloat16:
        why = bf16_refusal()
    if dtype == torch.bfloat16 and why:
        what, fix = "bf16 would be slower than fp32 on this device", 'set it to "fp32", or to "auto"'
        where = config.place("model.dtype")
        raise ConfigError(Problem(code="model.slow-bf16", where=where, what=what, why=why, fix=fix))
    return dtype


def bf16_refusal() -> str | None:
    """Return why bf16 does not pay on this CPU, by a product timed both ways; None where it has instructions for it."""
    if has_instructions():
        return None
    fp32_s, bf16_s = product_s(torch.float32), product_s(torch.bfloat16)
    if bf16_s < fp32_s:
        return None
    times = f"{1e3 * bf16_s:.2f} ms in bf16 and {1e3 * fp32_s:.2f} ms in fp32"
    return f"it emulates bf16: a product of {ROWS} x {WIDTH} x {WIDTH} takes {times}"


def has_instructions() -> bool:
    """True for products of bf16 numbers by AVX-512 BF16 or AMX, if PyTorch reports them; other CPUs are timed."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def product_s(dtype: torch.dtype) -> float:
    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    with torch.no_grad():
        return min(timeit.repeat(lambda: functional.linear(x, weight), number=1, repeat=ROUNDS))
