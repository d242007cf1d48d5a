"""A signal in the middle of a call, as Ctrl-C sends one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop(BaseException):
    """What the signal's handler raises."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
