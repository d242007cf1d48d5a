"""Entry point of a child process: a guard, and below it the worker that holds the object.

The guard runs only our code. It kills the worker, and all that the worker has started, as soon as the run closes the
life line or dies, even by SIGKILL and even while user code spins in C, and it reports to the run how a worker died. Few
imports come before the fork, so that the guard is small and single-threaded.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn, TextIO

from retrain.tasks.child.system import adopt_orphans, die_with_parent, kill_descendants, limit_memory


def main() -> None:
    """Read `argv`: import paths (already used), our parent, descriptors of calls and life line, bytes of memory."""
    parent, calls, life_line, memory_bytes = (int(word) for word in sys.argv[2:6])
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        # Only the run ends us. The handlers do nothing: signals set to SIG_IGN would stay ignored after an exec.
        signal.signal(getattr(signal, name), lambda *_: None)
    adopt_orphans()
    read_end, write_end = os.pipe()
    guard = os.getpid()
    worker = os.fork()
    if worker:
        os.close(calls)
        os.close(write_end)
        watch(worker, life_line, read_end, parent=parent)
    die_with_parent()
    if os.getppid() != guard:  # it died before our death was tied to its own
        os._exit(1)
    adopt_orphans()
    os.set_inheritable(calls, False)
    os.close(life_line)
    os.close(read_end)
    os.dup2(write_end, 1)  # the guard gets the output of user code and keeps its end
    os.dup2(write_end, 2)
    os.close(write_end)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    limit_memory(memory_bytes)
    from retrain.tasks.child.worker import serve  # numpy and the types: the guard needs none of it

    serve(calls)


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


# The guard of a worker: reads its output, waits for its end, and kills it when the run is gone.


TAIL_BYTES = 4096
CHUNK_BYTES = 65536
PARENT_S = 1.0
MAX_LAST_CHUNKS = 64  # a process that the worker left behind may keep printing


def watch(worker: int, life_line: int, output: int, *, parent: int) -> NoReturn:
    """Wait until the worker or the run ends, then kill every process below us and report the worker's end.

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
    # It may have ended before the handler was installed, and then no signal would wake `select`.
    status = _ended(worker)
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
        os.set_blocking(output, False)
        with suppress(BlockingIOError):
            for _ in range(MAX_LAST_CHUNKS):
                if not (chunk := os.read(output, CHUNK_BYTES)):
                    break
                tail = (tail + chunk)[-TAIL_BYTES:]
        message = json.dumps({"status": status, "output": tail.decode("utf-8", "replace")})
        with suppress(OSError):
            os.write(life_line, message.encode("ascii"))
    kill_descendants()
    # Ourselves, and the orphans of our group where the system lets us adopt none.
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _ended(worker: int) -> int | None:
    """Return the worker's exit code, negative for a signal, None while it runs; reaps adopted orphans as well."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == worker:
            return os.waitstatus_to_exitcode(status)
