"""How many tokens a pack may hold: derived from free memory, reduced after running out of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from retrain.api import OutOfMemoryError, Problem
from retrain_local.decoder import Shape
from retrain_local.memory.limits import MemoryLimits, free_bytes
from retrain_local.memory.sizes import (
    ACTIVATION_SHARE_GPU,
    FULL_SPEED_TOKENS,
    TOKEN_BUDGET,
    PackPlan,
    activation_elements,
    plan_cpu_packs,
)

LOG = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSize:
    """The size of a pack: `tokens` from `rows` rows, the longest of which has `longest`."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0


def activation_bytes(shape: Shape, dtype: torch.dtype, *, recompute: bool, device: str = "cuda") -> int:
    """Bytes that one token of a pack occupies until the backward pass, and in it."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size + 2 * shape.heads * shape.value_size
    sizes = {"hidden": shape.hidden, "attention": attention, "inner": shape.inner}
    return int(dtype.itemsize) * activation_elements(shape.layers, **sizes, recompute=recompute, device=device)


def plan_packs(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, asked: str, at_a_time: int, prompt: int
) -> PackPlan:
    """The packs of a run, by the memory that is free before its first step and by `gradient_checkpointing` (`asked`).

    `prompt` is the length of the longest beginning that a group shares.
    """
    if device.type == "cpu":
        kept, recomputed = (activation_bytes(shape, dtype, recompute=again, device="cpu") for again in (False, True))
        sizes, longest = (kept, recomputed, free_bytes(device)), shape.context
        return plan_cpu_packs(*sizes, asked=asked, at_a_time=at_a_time, prompt=prompt, context=longest)
    room = activation_room(device)
    plain = room // activation_bytes(shape, dtype, recompute=False)
    recompute = asked == "on" or (asked == "auto" and plain < FULL_SPEED_TOKENS)
    fitting = room // activation_bytes(shape, dtype, recompute=True) if recompute else plain
    tokens = max(1, min(TOKEN_BUDGET.get(device.type, TOKEN_BUDGET["cuda"]), fitting))
    return PackPlan(tokens=tokens, recompute=recompute, kept_tokens=plain if asked == "auto" and not recompute else 0)


def activation_room(device: torch.device) -> int:
    """Bytes available to activations on a GPU: most of the free memory."""
    return int(ACTIVATION_SHARE_GPU * free_bytes(device))


def is_short(shape: Shape, dtype: torch.dtype, device: torch.device, limits: MemoryLimits) -> bool:
    """Whether so little memory is free that sampling should release its cache, and its CUDA graphs, before training.

    Before the first step: whether recomputation would be turned on; after it: whether the packs it chose do not fit.
    """
    if device.type != "cuda":
        return False
    if not limits.pack_tokens:
        return activation_room(device) // activation_bytes(shape, dtype, recompute=False) < FULL_SPEED_TOKENS
    tokens = limits.train_tokens or limits.pack_tokens
    return free_bytes(device) < tokens * activation_bytes(shape, dtype, recompute=limits.recompute)


def shrink(limits: MemoryLimits, size: PackSize, device: torch.device, *, recompute: bool) -> None:
    """After running out of memory recompute activations from now on, or halve the budget; log it."""
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
    """The error for a pack that does not fit; `fitting_tokens` is the size of the largest that did."""
    rows = "one row" if size.rows == 1 else f"{size.rows} rows"
    needs = size.tokens * activation_bytes(shape, dtype, recompute=True) / 2**20
    what = f"training ran out of memory on {device} with {size.tokens} tokens of {rows}"
    why = f"their activations need about {needs:.1f} MiB, even with recomputation"
    if size.rows > 1:
        smaller = min(size.tokens - 1, max(size.tokens // 2, fitting_tokens))
        fix = f"set [backend.options] micro_batch_tokens = {smaller} (it does not change the gradient)"
    else:
        shorter = max(1, min(size.longest - 1, max(size.longest // 2, fitting_tokens)))
        fix = (
            f"keep rows, prompt and completion together, below {shorter} tokens with [training] max_tokens, or use a "
            "smaller [model] model or a GPU with more memory"
        )
    return OutOfMemoryError(Problem(where="training", what=what, why=why, fix=fix))
