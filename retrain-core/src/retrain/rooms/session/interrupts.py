"""Signals: a run that is asked to stop does so inside sampling, scoring, training or eval, and leaves a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from retrain.kernel.errors import EXIT_FAILED, EXIT_RESUMABLE, RetrainError, StopRequested

T = TypeVar("T")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Interrupts:
    """Turns the first signal into `StopRequested`, at once or, inside a shield, when the shield ends.

    `shield` protects what must not be torn: an optimizer step, a write. Within it, long work calls `check` where it
    may stop. A second signal, or `grace_s` seconds without an end, leaves the process at once: checkpoints are
    complete or invisible, so the last one stays valid.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._reason = ""
        self._is_settled = False
        self._depth = 0
        self._resumable = False
        self._timer: threading.Timer | None = None
        self._failure: RetrainError | None = None
        self._is_installed = False
        self._own_signal = 0  # sent by ourselves and not yet seen

    @property
    def reason(self) -> str:
        """Why the run is to stop; empty while it is not."""
        return self._reason

    def may_resume(self) -> None:
        """A valid checkpoint exists: leaving by force means "resume me" from now on."""
        self._resumable = True

    def request(self, reason: str) -> None:
        """Ask for a stop, from a signal handler in the main thread."""
        if self._reason:
            self._leave(f"second request ({reason}): leaving at once")
        self._begin(reason)

    def fail(self, failure: RetrainError) -> None:
        """Ask for a stop that is a failure, from any thread; nothing when a stop goes on already.

        The main thread is woken by a signal, so that even a blocking call ends. Where it does not react, or cannot be
        told, the process is left after `grace_s` seconds.
        """
        if self._reason:
            return
        self._failure = failure
        self._start_timer()
        if self._is_installed and hasattr(signal, "pthread_kill"):
            self._own_signal = SIGNALS[-1]
            signal.pthread_kill(threading.main_thread().ident or 0, self._own_signal)

    def settle(self) -> None:
        """The stop is being carried out: from here on nothing is interrupted but by a second request."""
        self._is_settled = True

    def check(self) -> None:
        """Stop here if a stop was asked for; for safe points within a shield.

        It is raised again, should whoever was interrupted have swallowed it, until it is settled.
        """
        if self._reason and not self._is_settled:
            self._raise()

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Nothing in this block is torn by a signal; a stop asked for meanwhile happens at its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.check()

    def exposed(self, work: Callable[[], T]) -> T:
        """Do `work` as if there were no shield around it: a stop tears it with StopRequested, and the shield holds.

        A function and no `with` block, which a signal could leave with the shield down: once this has returned or
        raised, whatever comes next in the shield is as safe as before.
        """
        depth = self._depth
        try:
            try:
                self._depth = 0
                self.check()
                return work()
            finally:
                self._depth = depth
        except StopRequested:
            self._depth = depth  # it came between two statements of the block above; it comes no second time
            raise

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to the signals during the block; only the main thread can, elsewhere nothing is listened to."""
        if threading.current_thread() is not threading.main_thread():
            try:
                yield
            finally:
                self._stop_timer()
            return
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._is_installed = True
        try:
            yield
        finally:
            self._is_installed = False
            self._stop_timer()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == self._own_signal:
            self._own_signal = 0
            if not self._reason:
                self._begin("its own watchdog")
            return
        self.request(signal.Signals(number).name)

    def _begin(self, reason: str) -> None:
        self._reason = reason
        self._start_timer()
        if self._depth == 0:
            self._raise()

    def _start_timer(self) -> None:
        if self._timer:
            return  # started by `fail`, which could not know whether the main thread would react
        timer = threading.Timer(self._grace_s, self._leave, args=(f"not stopped within {self._grace_s:g} s: leaving",))
        timer.daemon = True
        timer.start()
        self._timer = timer

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()  # the process may have other things to do than this run

    def _raise(self) -> None:
        raise StopRequested(self._reason, self._failure)

    def _leave(self, message: str) -> Any:
        failure = f"{self._failure}\n" if self._failure else ""
        with suppress(OSError):  # not print: the handler may have interrupted the main thread inside of one
            os.write(2, f"{failure}retrain: {message}\n".encode())
        os._exit(EXIT_RESUMABLE if self._resumable and not failure else EXIT_FAILED)
