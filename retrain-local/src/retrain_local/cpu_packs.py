"""The packs of training on a CPU, from sizes alone: for the backend, and without PyTorch for the estimate."""

from __future__ import annotations

from dataclasses import dataclass

from retrain_local.sizes import (
    ACTIVATION_BYTES_CPU,
    ACTIVATION_SHARE_CPU,
    FULL_SPEED_TOKENS_CPU,
    PROMPTS_PER_PACK,
    TOKEN_BUDGET,
)

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Maximum tokens of a pack, and whether its activations are recomputed in the backward pass.

    If they are kept, those of a row of more than `kept_tokens` are recomputed nevertheless; 0 = no such limit.
    """

    tokens: int
    recompute: bool
    kept_tokens: int = 0


def plan_cpu_packs(
    kept: int, recomputed: int, free_bytes: float, *, asked: str, at_a_time: int, prompt: int
) -> PackPlan:
    """Activations are kept where packs of full speed fit into half of the memory that is free.

    `kept` and `recomputed` are the bytes of a token either way, `asked` is `gradient_checkpointing`, `prompt` the
    length of the longest one. A pack is no larger than full speed needs, which keeps memory low, unless the prompt,
    which every pack computes again, would be most of it.
    """
    room = ACTIVATION_SHARE_CPU * free_bytes / at_a_time
    recompute = asked == "on" or (asked == "auto" and FULL_SPEED_TOKENS_CPU * kept > room)
    each = recomputed if recompute else kept
    wanted = max(ACTIVATION_BYTES_CPU // at_a_time // each, FULL_SPEED_TOKENS_CPU, PROMPTS_PER_PACK * prompt)
    tokens = max(1, int(min(TOKEN_BUDGET["cpu"], wanted, room / each)))
    limit = int(min(room / kept, MOST_TOKENS)) if asked == "auto" and not recompute else 0
    return PackPlan(tokens=tokens, recompute=recompute, kept_tokens=limit)
