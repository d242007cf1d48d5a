"""Runs a function in a copy of this process, so that nothing it does to the memory of this one remains."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def in_copy(work: Callable[[], Any], *, timeout_s: float) -> Any | None:
    """What `work` returns, as JSON; None when its process died, or took longer than `timeout_s`.

    State and random generators of this process stay as they are; output and breakpoints of `work` are dropped. Files
    and servers are shared with it, as always. Where processes cannot be copied, nothing runs, and None is returned.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return None
    forking = multiprocessing.get_context("fork")
    reading, writing = forking.Pipe(duplex=False)
    copy = forking.Process(target=_answer, args=(work, writing, timeout_s))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy; the copy uses none of them
        copy.start()
    assert copy.pid
    writing.close()
    try:
        return json.loads(reading.recv_bytes()) if reading.poll(timeout_s) else None
    except (EOFError, OSError, ValueError):  # it died before or in the middle of its answer
        return None
    finally:
        reading.close()
        for end in (os.killpg, os.kill):  # with what it has started, if it came to that
            with suppress(ProcessLookupError, PermissionError):
                end(copy.pid, signal.SIGKILL)
        copy.join()


def _answer(work: Callable[[], Any], writing: Connection, timeout_s: float) -> None:
    """The copy's side; never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(timeout_s) + 1)  # it ends even if this process is gone
        nothing = open(os.devnull, "r+", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
        sys.stdin = sys.stdout = sys.stderr = nothing
        sys.breakpointhook = lambda *_, **__: None
        logging.disable()
        writing.send_bytes(json.dumps(work()).encode())
    finally:
        os._exit(0)  # no `atexit`, no buffers of the original
