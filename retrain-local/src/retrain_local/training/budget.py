"""The tokens that a pack may hold: derived from free memory, reduced after running out of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from retrain.api import OutOfMemoryError, Problem
from retrain_local.decoder import Shape
from retrain_local.memory.limits import MemoryLimits, free_bytes
from retrain_local.memory.sizes import (
    ACTIVATION_SHARE_GPU,
    ALIKE,
    FULL_SPEED_TOKENS,
    PackPlan,
    Rows,
    activation_elements,
    plan_cpu_packs,
    plan_gpu_packs,
)

LOG = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSize:
    """The size of a pack: `tokens` from `rows` rows; the longest row has `longest`."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0


def activation_bytes(
    shape: Shape, dtype: torch.dtype, *, recompute: bool, device: str = "cuda", rows: Rows = ALIKE
) -> int:
    names = ("hidden", "inner", "heads", "kv_heads", "head_size", "is_fused")
    given: dict[str, Any] = {name: getattr(shape, name) for name in names} | {"device": device, "rows": rows}
    given["measured"] = shape.activations() if shape.activations else None
    return int(dtype.itemsize) * activation_elements(shape.layers, recompute=recompute, **given)


def plan_packs(
    shape: Shape, dtype: torch.dtype, device: torch.device, rows: Rows, at_a_time: int, *, checkpointing: str
) -> PackPlan:
    """Plan the packs of a run by free memory and `gradient_checkpointing`; `rows` are those of its first step."""
    kind, free = "cpu" if device.type == "cpu" else "cuda", free_bytes(device)
    kept, recomputed = (
        activation_bytes(shape, dtype, recompute=again, device=kind, rows=rows) for again in (False, True)
    )
    if kind == "cuda":
        return plan_gpu_packs(kept, recomputed, free, checkpointing=checkpointing)
    given = {"at_a_time": at_a_time, "prompt": rows.prompt}
    return plan_cpu_packs(kept, recomputed, free, checkpointing=checkpointing, context=shape.context, **given)


def is_short(shape: Shape, dtype: torch.dtype, device: torch.device, limits: MemoryLimits) -> bool:
    """True if sampling should release its cache before training: packs do not fit, or would be recomputed."""
    if device.type != "cuda":
        return False
    if not limits.pack_tokens:
        room = ACTIVATION_SHARE_GPU * free_bytes(device)
        return room / activation_bytes(shape, dtype, recompute=False) < FULL_SPEED_TOKENS
    tokens = limits.train_tokens or limits.pack_tokens
    return free_bytes(device) < tokens * activation_bytes(shape, dtype, recompute=limits.recompute)


def shrink(limits: MemoryLimits, size: PackSize, device: torch.device, *, recompute: bool) -> None:
    """After running out of memory, recompute activations from now on or halve the budget, and log it."""
    if recompute:
        limits.recompute = True
        done = "Activations are recomputed in the backward pass"
    else:
        limits.train_tokens = max(1, size.tokens // 2)
        done = f"Packs hold {limits.train_tokens} tokens"
    LOG.warning(
        "Out of memory in training, with a pack of %d tokens from %d rows on %s. %s from now on, and the step is "
        "repeated; the gradient is the same.",
        size.tokens,
        size.rows,
        device,
        done,
    )


def too_big_to_train(
    size: PackSize, fitting_tokens: int, shape: Shape, dtype: torch.dtype, device: torch.device
) -> OutOfMemoryError:
    """Return the error for a pack that does not fit; the largest that did has `fitting_tokens`."""
    rows = "one row" if size.rows == 1 else f"{size.rows} rows"
    needs = size.tokens * activation_bytes(shape, dtype, recompute=True) / 2**20
    what = f"training ran out of memory on {device} with {size.tokens} tokens of {rows}"
    why = f"their activations need about {needs:.1f} MiB, even with recomputation"
    if size.rows > 1:
        smaller = min(size.tokens - 1, max(size.tokens // 2, fitting_tokens))
        fix = f"set [backend.options] micro_batch_tokens = {smaller} (it does not change the gradient)"
        problem = Problem(code="memory.pack-too-large", where="training", what=what, why=why, fix=fix)
    else:
        shorter = max(1, min(size.longest - 1, max(size.longest // 2, fitting_tokens)))
        limit = f"keep prompt and completion together below {shorter} tokens with [training] max_tokens"
        fix = f"{limit}, or use a smaller [model] model or a GPU with more memory"
        problem = Problem(code="memory.row-too-long", where="training", what=what, why=why, fix=fix)
    return OutOfMemoryError(problem)
