"""Time, processor time and memory of a piece of work in this process, on the CPU or a CUDA device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

T = TypeVar("T")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


class Meter:
    """Writes a line of figures for every measured call to `file`."""

    def __init__(self, file: str, device: str) -> None:
        self._file = Path(file).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._on_gpu = device != "cpu"

    def measure(self, work: Callable[[], T], **figures: Any) -> T:
        """Do it; the line has `seconds`, `used_s`, the memory needed at its peak beyond what was there, and `figures`.

        `used_s` is the processor time of this process and of those that it started.
        """
        before = self._start()
        used_s, started = _used_s(), time.perf_counter()
        result = work()
        if self._on_gpu:
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - started
        used_s = _used_s() - used_s
        peak = self._peak()
        step = None if before is None or peak is None else peak - before
        line = {"seconds": elapsed_s, "used_s": used_s, "step_bytes": step, "peak_bytes": peak, **figures}
        self._file.write(json.dumps(line) + "\n")
        return result

    def _start(self) -> int | None:
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return int(torch.cuda.memory_allocated())
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            return None
        return _status("VmRSS")

    def _peak(self) -> int | None:
        return int(torch.cuda.max_memory_allocated()) if self._on_gpu else _status("VmHWM")


def _used_s() -> float:
    own = psutil.Process()
    each = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(times.user + times.system for times in each)


def _status(name: str) -> int | None:
    try:
        return int(STATUS.read_text().partition(f"{name}:")[2].split(maxsplit=1)[0]) * 1024
    except OSError:
        return None
