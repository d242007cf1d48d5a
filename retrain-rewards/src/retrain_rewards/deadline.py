"""Time limits of one score: what `[scoring]` allows, and an interruption of Python code that takes longer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from retrain.api import Config

AGAIN_S = 0.5  # a library may swallow the first interruption in a bare `except`


class TimeUp(BaseException):
    """The time limit has passed; no `except Exception` on the way can swallow it."""


def time_limit_of(config: Config, name: str) -> float:
    """Seconds that one score of a reward may take: `[scoring.limits.NAME] timeout_s`, else `[scoring] timeout_s`."""
    limits = config.scoring.limits.get(name)
    own = limits.timeout_s if limits is not None else None
    return config.scoring.timeout_s if own is None else own


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the block after `seconds`, and again every half second until the block ends.

    It works by SIGALRM, in the main thread; in another thread the block has no limit. A single call into C code, such
    as the power of two long integers, is interrupted only when it returns, so the caller must be able to kill the
    process.
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
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return  # Python would print it and go on; the next alarm finds other code
        frame = frame.f_back
    raise TimeUp
