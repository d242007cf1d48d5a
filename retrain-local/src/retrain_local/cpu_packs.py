"""The packs of training on a CPU, from sizes alone: for the backend, and without PyTorch for the estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from retrain_local.sizes import (
    ACTIVATION_BYTES_CPU,
    ACTIVATION_SHARE_CPU,
    FULL_SPEED_TOKENS_CPU,
    PROMPTS_PER_PACK,
    TOKEN_BUDGET,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Maximum tokens of a pack, and whether its activations are recomputed in the backward pass.

    If they are kept, those of a row of more than `kept_tokens` are recomputed nevertheless; 0 = no such limit.
    """

    tokens: int
    recompute: bool
    kept_tokens: int = 0


def plan_cpu_packs(
    kept: int, recomputed: int, free_bytes: float, *, asked: str, at_a_time: int, prompt: int, context: int | None
) -> PackPlan:
    """Activations are kept where packs of full speed fit into half of the memory that is free.

    `kept` and `recomputed` are the bytes of a token either way, `asked` is `gradient_checkpointing`, `prompt` the
    length of the longest one, `context` that of the longest row there can be, if known. A pack is no larger than full
    speed needs, which keeps memory low, unless the prompt, which every pack computes again, would be most of it. The
    limit of a row is a power of two: checkpoints hold it, and two runs seldom find the same memory free.
    """
    room = ACTIVATION_SHARE_CPU * free_bytes / at_a_time
    recompute = asked == "on" or (asked == "auto" and FULL_SPEED_TOKENS_CPU * kept > room)
    each = recomputed if recompute else kept
    wanted = max(ACTIVATION_BYTES_CPU // at_a_time // each, FULL_SPEED_TOKENS_CPU, PROMPTS_PER_PACK * prompt)
    tokens = max(1, int(min(TOKEN_BUDGET["cpu"], wanted, room / each)))
    limit = room / kept if asked == "auto" and not recompute else math.inf
    limit = 0 if limit >= (context or math.inf) else max(tokens, 2 ** int(math.log2(limit)))
    return PackPlan(tokens=tokens, recompute=recompute, kept_tokens=limit)
