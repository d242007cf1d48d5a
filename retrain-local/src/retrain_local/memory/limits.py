"""What fits into memory: the sizes a run has settled on, and how to recognise an out-of-memory error."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

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
    whether activations are recomputed, `kept_tokens` the largest pack whose activations are not, `packs_at_a_time` what
    the number of packs is a multiple of, `train_tokens` the budget left after running out of memory.
    """

    train_tokens: int = 0
    cache_tokens: int = 0
    pack_tokens: int = 0
    pool_tokens: int = 0
    recompute: bool = False
    kept_tokens: int = 0
    packs_at_a_time: int = 0

    def tighten(self, ranks: Iterable[MemoryLimits]) -> None:
        """Take the smallest of the sizes that several ranks have settled on, so that all split their work alike."""
        found = list(ranks)
        for name in ("train_tokens", "cache_tokens", "pack_tokens", "kept_tokens", "packs_at_a_time"):
            setattr(self, name, min((size for limits in found if (size := getattr(limits, name))), default=0))
        self.pool_tokens = max(limits.pool_tokens for limits in found)
        self.recompute = any(limits.recompute for limits in found)

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore saved limits."""
        for field in fields(self):
            setattr(self, field.name, state.get(field.name, field.default))


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
    """Bytes this process can still allocate: on CUDA within its per-process fraction, else within its container."""
    if device.type != "cuda":
        return free_host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    share_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch before 2.8 has a setter only
    share = share_of(device) if share_of else 1.0
    return int(min(free + unused, share * total - allocated))


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of the machine that are available without swapping, or half of all where the system does not say (macOS).

    A container's limit counts, less what it uses; the cache of files, which it gives back, is not subtracted.
    """
    found = [total for text in _lines(meminfo) if (total := _kib(text, "MemAvailable:")) is not None]
    free = found[0] if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit, used = (next(iter(_lines(cgroup / name)), "") for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        files = sum(
            int(text.split()[1]) for text in _lines(cgroup / "memory.stat") if text.startswith("inactive_file ")
        )
        free = min(free, int(limit) - int(used) + files)
    return max(0, free)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _kib(line: str, name: str) -> int | None:
    words = line.split()
    return int(words[1]) * 2**10 if words[:1] == [name] else None
