"""What fits into memory: the sizes a run has settled on, and how to recognise an out-of-memory error."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from retrain.api import BackendError

# the CPU and Apple allocators raise a plain RuntimeError
MARKS = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(slots=True)
class MemoryLimits:
    """Sizes derived from free memory, or reduced after running out of it; 0 as long as neither has happened.

    They are part of a checkpoint, so that a resumed run splits its work exactly as before and rounds the same way.
    `cache_tokens` is the most that the key-value pool may hold and `pool_tokens`, where it is allocated at once, what
    the largest call so far needed; `pack_tokens` is the budget that training chose at its first step, `recompute`
    whether activations are recomputed, `train_tokens` the budget left after running out of memory.
    """

    train_tokens: int = 0
    cache_tokens: int = 0
    pack_tokens: int = 0
    pool_tokens: int = 0
    recompute: bool = False

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore saved limits."""
        self.train_tokens = state.get("train_tokens", 0)
        self.cache_tokens = state.get("cache_tokens", 0)
        self.pack_tokens = state.get("pack_tokens", 0)
        self.pool_tokens = state.get("pool_tokens", 0)
        self.recompute = bool(state.get("recompute", False))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator raised this error."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, BackendError) and any(mark in str(error).lower() for mark in MARKS)


def free_memory(device: torch.device) -> None:
    """Release memory that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Bytes this process can still allocate on a CUDA device, within its per-process memory fraction."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    share_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch before 2.8 has a setter only
    share = share_of(device) if share_of else 1.0
    return int(min(free + unused, share * total - allocated))
