"""Signals to a campaign: the first asks its runs to save their state and exit, a second kills them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, n))


class Stops:
    """The stop requested so far. `wait` is a sleep that a signal interrupts."""

    def __init__(self) -> None:
        self.reason = ""
        self.is_urgent = False
        self._event = threading.Event()

    def request(self, reason: str) -> None:
        """Request a stop; a second request makes it urgent."""
        self.is_urgent = bool(self.reason)
        self.reason = self.reason or reason
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives."""
        self._event.wait(seconds)
        self._event.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals within the block; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
