"""Free memory, out-of-memory errors, and the sizes that a run has chosen by them."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from retrain.api import BackendError

# the CPU and Apple allocators raise a plain RuntimeError
MARKS = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(slots=True)
class MemoryLimits:
    """Sizes derived from free memory, or reduced after running out of it; 0 until then.

    They are part of a checkpoint, so that a resumed run splits its work exactly as before and rounds the same way.
    `cache_tokens` bounds the key-value pool; `pool_tokens`, where it is allocated at once, is the need of the largest
    call so far. `pack_tokens` is the budget that training chose at its first step, `train_tokens` the budget left after
    running out of memory, `kept_tokens` the largest pack with activations kept. `packs_at_a_time` divides the packs.
    `cache_slots` and `pool_slots` are the same for rows and prompts whose other state is kept at a time.
    """

    train_tokens: int = 0
    cache_tokens: int = 0
    pack_tokens: int = 0
    pool_tokens: int = 0
    recompute: bool = False
    kept_tokens: int = 0
    packs_at_a_time: int = 0
    cache_slots: int = 0
    pool_slots: int = 0

    def tighten(self, ranks: Iterable[MemoryLimits]) -> None:
        """Take the smallest sizes of several ranks, so that all split their work alike."""
        found = list(ranks)
        for name in ("train_tokens", "cache_tokens", "pack_tokens", "kept_tokens", "packs_at_a_time", "cache_slots"):
            setattr(self, name, min((size for limits in found if (size := getattr(limits, name))), default=0))
        for name in ("pool_tokens", "pool_slots"):
            setattr(self, name, max(getattr(limits, name) for limits in found))
        self.recompute = any(limits.recompute for limits in found)

    def restore(self, state: Mapping[str, int]) -> None:
        for field in fields(self):
            setattr(self, field.name, state.get(field.name, field.default))


def is_out_of_memory(error: RuntimeError) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, BackendError) and any(mark in str(error).lower() for mark in MARKS)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give the C library's free memory back to the system: glibc keeps it for the thread that freed it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:
        trim(0)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate, within its CUDA fraction or its container."""
    if device.type != "cuda":
        return free_host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    # torch before 2.8 can only set it.
    share_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = share_of(device) if share_of else 1.0
    return int(min(free + unused, share * total - allocated))


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes available without swapping, within a container's limit."""
    # a container's cache of files is not subtracted, since the system reclaims it
    fields = dict(line.split()[:2] for line in _lines(meminfo) if line)
    available = fields.get("MemAvailable:")
    free = int(available) * 2**10 if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit, used = (next(iter(_lines(cgroup / name)), "") for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        stat = dict(line.split()[:2] for line in _lines(cgroup / "memory.stat") if line)
        free = min(free, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return max(0, free)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
