"""Entry point of a child process: a guard, and below it the worker that holds the object.

The guard runs our code alone. It kills the worker, and whatever the worker has started, as soon as the run closes the
life line or dies, even by SIGKILL and even while user code spins in C, and it reports to the run how a worker died. Few
imports come before the fork, so that the guard is small and single-threaded.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TextIO

from retrain.tasks.child.parent_death import watch
from retrain.tasks.child.system import adopt_orphans, die_with_parent, limit_memory


def main() -> None:
    """`argv`: import paths as JSON (already read), our parent, descriptors of calls and life line, bytes of memory."""
    parent, calls, life_line, memory_bytes = (int(word) for word in sys.argv[2:6])
    _ignore_signals()
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
    _redirect(write_end)
    limit_memory(memory_bytes)
    from retrain.tasks.child.worker import serve  # numpy and the types: the guard needs none of it

    serve(calls)


def _ignore_signals() -> None:
    """Only the run ends us. The handlers do nothing: signals set to SIG_IGN would stay ignored after an exec."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda *_: None)


def _redirect(output: int) -> None:
    """Send the output of user code to the guard, which keeps its end; none reaches a frame or the console."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
