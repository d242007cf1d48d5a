"""Runs a program and watches it from outside: when each line of its records appears, and how much memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S, MEMORY_S, DEVICE_S = 0.003, 0.1, 0.25
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes on macOS, KiB elsewhere
PROC = Path("/proc")
TAIL_CHARS, REASON_CHARS = 4000, 120
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Failed(Exception):  # noqa: N818
    """A program ended with an error or without all of its records: `reason` in a few words, the text in full."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{text}\n{reason}" if text else reason)
        self.reason = reason[:REASON_CHARS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process, from its start to its end; times are seconds since the start, `cpu_s` those of all its threads.

    `peak_bytes` is the most that the process itself had in memory (or one of its children, where that is more).
    `tree_bytes` adds what its children had then: every process counts with its own peak, so shared pages count more
    than once. None off Linux. `device_bytes` is what the CUDA device gave out meanwhile.
    `used_s` is the processor time of all these processes when each line was seen (0 off Linux): unlike `seen_s` it
    hardly depends on what else is running.
    """

    seen_s: tuple[float, ...]
    used_s: tuple[float, ...]
    records: tuple[dict[str, Any], ...]
    wall_s: float
    cpu_s: float
    peak_bytes: int
    tree_bytes: int | None
    device_bytes: int | None

    def periods_s(self, first: int = 1) -> list[float]:
        """From each record to the next, beginning with the one that ends at record `first`."""
        return [self.seen_s[at] - self.seen_s[at - 1] for at in range(first, len(self.seen_s))]

    def used_per_period_s(self, first: int = 1) -> float:
        """Processor time of such a period, on average."""
        return (self.used_s[-1] - self.used_s[first - 1]) / (len(self.used_s) - first)


class _Lines:
    """Reads a growing JSONL file; a line counts once it is complete."""

    def __init__(self, file: Path) -> None:
        self._file, self._rest, self._at = file, b"", 0
        self.seen_s: list[float] = []
        self.used_s: list[float] = []
        self.records: list[dict[str, Any]] = []

    def look(self, now_s: float, pid: int) -> None:
        try:
            if self._file.stat().st_size == self._at:
                return
        except FileNotFoundError:
            return
        with self._file.open("rb") as stream:
            stream.seek(self._at)
            fresh = stream.read()
        self._at += len(fresh)
        *complete, self._rest = (self._rest + fresh).split(b"\n")
        for line in complete:
            self.records.append(json.loads(line))
            self.seen_s.append(now_s)
            self.used_s.append(_used_s(pid))


class _Device:
    """The most memory that the first CUDA device had given out, above what it had before, asked in a thread."""

    def __init__(self) -> None:
        self._before, self._most, self._done = _device_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(DEVICE_S):
            self._most = max(self._most, _device_bytes())

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(0, self._most - self._before)


def watch(
    command: Sequence[str], *, folder: Path, lines: str, environ: Mapping[str, str] | None = None, device: str = "cpu"
) -> Run:
    """Run `command` in `folder` to its end; `lines` is the JSONL file below it whose lines are timed.

    Settings of the number of threads are not inherited: a program runs as it would for a user, unless `environ` says
    otherwise. A program that fails raises `Failed` with the end of what it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in THREADS}
    gpu = _Device() if device == "cuda" else None
    reader, tree, next_look = _Lines(folder / lines), 0, 0.0
    with (folder / "output.log").open("wb") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env={**inherited, **(environ or {})}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        while True:
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            now_s = time.perf_counter() - started
            reader.look(now_s, process.pid)
            if done:
                break
            if now_s >= next_look:
                tree, next_look = max(tree, _tree_bytes(process.pid)), now_s + MEMORY_S
            time.sleep(POLL_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    device_bytes = gpu.stop() if gpu else None
    if process.returncode:
        _give_up(command, process.returncode, folder / "output.log")
    return Run(
        seen_s=tuple(reader.seen_s),
        used_s=tuple(reader.used_s),
        records=tuple(reader.records),
        wall_s=now_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * RSS_UNIT,
        tree_bytes=max(tree, usage.ru_maxrss * RSS_UNIT) if tree else None,
        device_bytes=device_bytes,
    )


def _give_up(command: Sequence[str], code: int, log: Path) -> None:
    tail = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
    last = (tail.strip().splitlines() or [""])[-1]
    raise Failed(
        f"exit code {code}: {last}", f"{tail}\nthis failed with exit code {code}: {' '.join(map(str, command))}"
    )


def _tree_bytes(pid: int) -> int:
    """Sum of the peaks of a process and its descendants that are alive; 0 where the system has no /proc."""
    peaks = [text.partition("VmHWM:")[2].split(maxsplit=1) for text in _tree(pid, "status")]
    return sum(int(peak[0]) * 1024 for peak in peaks if peak)


def _used_s(pid: int) -> float:
    """Processor time of a process and its descendants that are alive; see proc_pid_stat(5)."""
    fields = [text.rpartition(")")[2].split() for text in _tree(pid, "stat")]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _tree(pid: int, name: str) -> list[str]:
    """A file of /proc of a process and of each of its descendants."""
    found, waiting = [], [pid]
    while waiting:
        folder = PROC / str(waiting.pop())
        try:
            found.append((folder / name).read_text(encoding="utf-8", errors="replace"))
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):  # gone in the meantime, or another system
            continue
    return found


def _device_bytes() -> int:
    asked = ("--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    done = subprocess.run(["nvidia-smi", *asked], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) * 2**20 if done.returncode == 0 and done.stdout.strip() else 0
