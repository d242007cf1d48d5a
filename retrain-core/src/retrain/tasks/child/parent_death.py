"""The guard of a worker: reads its output, waits for its end, and kills it when the run is gone."""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import suppress
from typing import NoReturn

from retrain.tasks.child.orphans import kill_descendants

TAIL_BYTES = 4096
CHUNK_BYTES = 65536
PARENT_S = 1.0
MAX_LAST_CHUNKS = 64  # a process that the worker left behind may keep printing


def watch(worker: int, life_line: int, output: int, *, parent: int) -> NoReturn:
    """Wait until the worker or the run ends, then kill every process below us; the worker's end is reported.

    A closed life line means that the run has ended. Forked copies of the run hold the life line open too, so our parent
    is checked every `PARENT_S` seconds.
    """
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tail = b""
    watched = [life_line, output, woken]
    status = _ended(worker)  # it may have ended before the handler was installed
    while status is None:
        ready = select.select(watched, [], [], PARENT_S)[0]
        if life_line in ready or os.getppid() != parent:
            break  # the run never writes: it has closed the life line, or is dead
        if output in ready:
            chunk = os.read(output, CHUNK_BYTES)
            tail = (tail + chunk)[-TAIL_BYTES:]
            if not chunk:
                watched.remove(output)  # user code closed both of its outputs
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, CHUNK_BYTES)
            status = _ended(worker)
    if status is not None:
        _report(life_line, status, _drain(output, tail))
    kill_descendants()
    os.killpg(0, signal.SIGKILL)  # ourselves, and orphans of the group where the system lets us adopt none
    os._exit(0)


def _ended(worker: int) -> int | None:
    """The worker's exit code, negative for a signal, None while it runs; reaps adopted orphans as well."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == worker:
            return os.waitstatus_to_exitcode(status)


def _drain(output: int, tail: bytes) -> bytes:
    os.set_blocking(output, False)
    with suppress(BlockingIOError):
        for _ in range(MAX_LAST_CHUNKS):
            chunk = os.read(output, CHUNK_BYTES)
            if not chunk:
                break
            tail = (tail + chunk)[-TAIL_BYTES:]
    return tail


def _report(life_line: int, status: int, tail: bytes) -> None:
    message = json.dumps({"status": status, "output": tail.decode("utf-8", "replace")})
    with suppress(OSError):
        os.write(life_line, message.encode("ascii"))
