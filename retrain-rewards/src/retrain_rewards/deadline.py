"""Interrupts Python code that takes too long, in the main thread of a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.5  # a library may swallow the first interruption in a bare `except`


class TimeUp(BaseException):
    """The time limit has passed; no `except Exception` on the way can swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeUp is raised in the block after `seconds`, and again every half second until it is left.

    Works in the main thread, by SIGALRM; elsewhere the block runs unlimited. A single call into C code, such as the
    power of two long integers, is interrupted only when it returns: whoever runs this must be able to kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGALRM, _raise)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:  # the alarm may have come one step before
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, earlier)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeUp
