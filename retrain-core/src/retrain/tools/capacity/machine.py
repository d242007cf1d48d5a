"""Memory of this machine, and the kind of device that a configuration selects on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ASK_S = 10.0


@cache
def gpu_memory_bytes() -> tuple[int, ...]:
    """Total memory of each NVIDIA GPU, by index; empty if `nvidia-smi` does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
        return tuple(int(line) * 2**20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def host_memory_bytes() -> int | None:
    """Memory that this process may use, of the machine or its container; None if the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    limits = [limit for file in CGROUP_LIMITS if (limit := _limit(file)) is not None]
    return min([total, *limits])


def device_kind(devices: str) -> str:
    """`cuda` if the first device is a GPU that exists, else `cpu`, which the backend falls back to."""
    first = devices.split(",")[0].strip()
    return "cuda" if first.startswith("gpu") and gpu_memory_bytes() else "cpu"


def memory_limit(devices: str) -> int | None:
    """Bytes of the configured device, of several the smallest; None if the system does not say."""
    if device_kind(devices) == "cpu":
        return host_memory_bytes()
    sizes = gpu_memory_bytes()
    names = [name.strip().removeprefix("gpu").removeprefix(":") for name in devices.split(",")]
    numbers = [int(name) if name.isdigit() else 0 for name in names]
    return min(sizes[number] for number in numbers) if max(numbers) < len(sizes) else None


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
