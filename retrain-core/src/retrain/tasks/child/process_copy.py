"""Runs a function in a copy of this process, so that nothing it does to the memory of this one remains."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LOG = logging.getLogger("retrain")
CHUNK_BYTES = 65536


def in_copy(work: Callable[[], Any], *, timeout_s: float) -> Any | None:
    """What `work` returns, as JSON; None when its process died, or took longer than `timeout_s`.

    State and random generators of this process stay as they are; output and breakpoints of `work` are dropped. Files
    and servers are shared with it, as always. Where processes cannot be copied, nothing runs, and None is returned.
    """
    if not hasattr(os, "fork"):
        return None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy; the copy uses none of them
        pid = os.fork()
    if pid == 0:
        _answer(work, writing, timeout_s)
    os.close(writing)
    try:
        content = _received(reading, timeout_s)
        return json.loads(content) if content else None
    except ValueError:  # it died in the middle of its answer
        return None
    finally:
        os.close(reading)
        for end in (os.killpg, os.kill):  # with what it has started, if it came to that
            with suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(work: Callable[[], Any], writing: int, timeout_s: float) -> None:
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
        with os.fdopen(writing, "wb") as answer:
            answer.write(json.dumps(work()).encode())
    finally:
        os._exit(0)  # no `atexit`, no buffers of the original


def _received(reading: int, timeout_s: float) -> bytes:
    content, deadline = b"", time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        chunk = os.read(reading, CHUNK_BYTES)
        if not chunk:
            return content
        content += chunk
    return b""
