"""What fits into memory: sizes that a run has settled on, and out of memory told from other errors."""

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
    """Sizes found from free memory, or brought down by running out of it; 0 where neither happened yet.

    They are part of a checkpoint: a resumed run cuts its work as the run before did, to the last bit of rounding.
    `cache_tokens` is the size of the key-value pool. `pack_tokens` is the budget that training found at its first step,
    `recompute` whether it computes activations again, `train_tokens` what running out of memory left of it.
    """

    train_tokens: int = 0
    cache_tokens: int = 0
    pack_tokens: int = 0
    recompute: bool = False

    def restore(self, state: Mapping[str, int]) -> None:
        """Take over saved limits."""
        self.train_tokens = state.get("train_tokens", 0)
        self.cache_tokens = state.get("cache_tokens", 0)
        self.pack_tokens = state.get("pack_tokens", 0)
        self.recompute = bool(state.get("recompute", False))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator raised this."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, BackendError) and any(mark in str(error).lower() for mark in MARKS)


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate on a CUDA device, within the share of it that the process is allowed."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    share_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch before 2.8 sets and does not tell
    share = share_of(device) if share_of else 1.0
    return int(min(free + unused, share * total - allocated))
