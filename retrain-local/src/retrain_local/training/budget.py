"""How many tokens a pack may hold: derived from free memory, reduced after running out of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from retrain.api import OutOfMemoryError, Problem
from retrain_local.decoder import Shape
from retrain_local.memory.limits import MemoryLimits, free_bytes
from retrain_local.memory.sizes import ACTIVATION_SHARE_GPU, FULL_SPEED_TOKENS, TOKEN_BUDGET, PackPlan, plan_cpu_packs

LOG = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSize:
    """The size of a pack: `tokens` from `rows` rows, the longest of which has `longest`."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0


def activation_bytes(shape: Shape, dtype: torch.dtype, *, recompute: bool, device: str = "cuda") -> int:
    """Bytes that one token of a pack occupies until the backward pass, and in it.

    A layer keeps its input twice (before and after the norm, again around the feed-forward part), queries, keys and
    values before and after their rotation, what was gathered, and three vectors of the inner size. With `recompute` a
    layer keeps its input alone, and one layer at a time the rest. The head keeps a vector of the hidden size. Without
    it a CPU keeps neither normed inputs nor gated products (`operations.made_again`).
    """
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size + 2 * shape.heads * shape.value_size
    layer = 6 * shape.hidden + attention + 4 * shape.inner
    spared = 2 * shape.hidden + shape.inner if device == "cpu" and not recompute else 0
    kept = shape.layers * shape.hidden + 2 * layer if recompute else (shape.layers + 1) * (layer - spared)
    return int((kept + 4 * shape.hidden) * dtype.itemsize)


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
    recompute = asked == "on" or (asked == "auto" and plan_recompute(shape, dtype, room))
    kept = room // activation_bytes(shape, dtype, recompute=False) if asked == "auto" and not recompute else 0
    tokens = token_budget(shape, dtype, device, room, recompute=recompute)
    return PackPlan(tokens=tokens, recompute=recompute, kept_tokens=kept)


def plan_recompute(shape: Shape, dtype: torch.dtype, free_bytes: int) -> bool:
    """Whether storing all activations would limit packs on a GPU to fewer tokens than full speed needs."""
    return free_bytes // activation_bytes(shape, dtype, recompute=False) < FULL_SPEED_TOKENS


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
        return plan_recompute(shape, dtype, activation_room(device))
    tokens = limits.train_tokens or limits.pack_tokens
    return free_bytes(device) < tokens * activation_bytes(shape, dtype, recompute=limits.recompute)


def token_budget(shape: Shape, dtype: torch.dtype, device: torch.device, room_bytes: int, *, recompute: bool) -> int:
    """Maximum tokens of a pack on a GPU."""
    most = TOKEN_BUDGET.get(device.type, TOKEN_BUDGET["cuda"])
    return max(1, min(most, room_bytes // activation_bytes(shape, dtype, recompute=recompute)))


def recompute_from_now_on(limits: MemoryLimits, size: PackSize, device: torch.device) -> None:
    """Recompute activations from now on, after running out of memory, and log it."""
    limits.recompute = True
    LOG.warning(
        "Out of memory in training, with a pack of %d tokens on %s. Activations are recomputed in the backward pass "
        "from now on, and the step is repeated; the gradient is the same.",
        size.tokens,
        device,
    )


def halve(limits: MemoryLimits, size: PackSize, device: torch.device) -> None:
    """Halve the budget after running out of memory, and log it."""
    limits.train_tokens = max(1, size.tokens // 2)
    LOG.warning(
        "Out of memory in training, with a pack of %d tokens from %d rows on %s. Packs hold %d tokens from now on, and "
        "the step is repeated; the gradient is the same.",
        size.tokens,
        size.rows,
        device,
        limits.train_tokens,
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
