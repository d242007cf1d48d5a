"""The guard of a worker: reads what it prints, waits for its end, and ends it when the run is gone."""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import suppress
from typing import NoReturn

from retrain.rooms.tasks.child.orphans import kill_descendants

TAIL_BYTES = 4096
CHUNK_BYTES = 65536
PARENT_S = 1.0
MAX_LAST_CHUNKS = 64  # a worker's heir may go on printing


def watch(worker: int, life_line: int, output: int, *, parent: int) -> NoReturn:
    """Until the worker ends, which is told over the life line, or the run does; then everything below us dies.

    The run has ended when the life line has. Copies of the run that were forked meanwhile hold it open as well, so our
    parent is looked at now and then.
    """
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tail = b""
    watched = [life_line, output, woken]
    status = _ended(worker)  # before the handler was there
    while status is None:
        ready = select.select(watched, [], [], PARENT_S)[0]
        if life_line in ready or os.getppid() != parent:
            break  # the run never writes: it closed the life line, or is dead
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
        _tell(life_line, status, _drain(output, tail))
    kill_descendants()
    os.killpg(0, signal.SIGKILL)  # us too; members of the group that are nobody's children where none can be adopted
    os._exit(0)


def _ended(worker: int) -> int | None:
    """The worker's exit code, negative for a signal, or None; adopted orphans are reaped on the way."""
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


def _tell(life_line: int, status: int, tail: bytes) -> None:
    message = json.dumps({"status": status, "output": tail.decode("utf-8", "replace")})
    with suppress(OSError):
        os.write(life_line, message.encode("ascii"))
