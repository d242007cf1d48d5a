"""Signals: a stop takes effect inside sampling, scoring, training or evaluation, and the run saves a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from retrain.kernel.errors import EXIT_FAILED, EXIT_RESUMABLE, RetrainError, StopRequested
from retrain.text.secrets import hide_text

T = TypeVar("T")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


@contextmanager
def handled_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[bool]:
    """Handle signals during the block, if True; outside the main thread, where Python forbids it, handle none."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield is_main
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Interrupts:
    """Turns the first signal into `StopRequested`, at once or, inside a shield, when the shield ends.

    `shield` protects what must not be interrupted: an optimizer step, a write. Within it, long work calls `check` where
    it may stop. After a second signal, or if the run has not ended within `grace_s` seconds, the process exits at once:
    checkpoints are complete or invisible, so the last one stays valid. `is_guest`: the process has other work than this
    run, a notebook say, so KeyboardInterrupt in its main thread takes the place of that exit.
    """

    def __init__(self, *, grace_s: float, is_guest: bool = False) -> None:
        self._grace_s = grace_s
        self._is_guest = is_guest
        self._reason = ""
        self._stopping_in = 0  # thread that carries the stop out
        self._depth = 0
        self._resumable = False
        self._timer: threading.Timer | None = None
        self._failure: RetrainError | None = None
        self._is_installed = False
        self._own_signal = 0  # sent by `fail` and not yet handled
        self._holding = 0  # thread in `held`

    @property
    def reason(self) -> str:
        """Why the run must stop; empty if no stop is requested."""
        return self._reason

    def may_resume(self) -> None:
        self._resumable = True

    def request(self, reason: str) -> None:
        """Request a stop, from a signal handler in the main thread."""
        if self._reason:
            self._leave(f"second request ({reason}): leaving at once")
        self._begin(reason)

    def fail(self, failure: RetrainError) -> None:
        """Request a stop because of `failure`, from any thread; does nothing when a stop is already under way.

        A signal wakes the main thread, so that even a blocking call ends. If it does not react, or cannot be signalled,
        the process exits after `grace_s` seconds.
        """
        if self._reason:
            return
        self._failure = failure
        self._start_timer()
        # A signal ends even a blocking call. Windows has no `pthread_kill`, only the timer.
        if self._is_installed and hasattr(signal, "pthread_kill"):
            self._own_signal = SIGNALS[-1]
            signal.pthread_kill(threading.main_thread().ident or 0, self._own_signal)

    def give_up(self, failure: RetrainError) -> None:
        """Request a stop because of `failure`, from the run's own thread; a stop already under way continues."""
        if not self._reason:
            self._failure = failure
            self._begin("a lost record")

    def acknowledge(self) -> None:
        self._stopping_in = threading.get_ident()

    def check(self) -> None:
        """Stop here if a stop was requested; for safe points within a shield.

        Raises on every call until `acknowledge`, in case the interrupted code swallowed the exception; and after it in
        every other thread, whose work is not needed any more.
        """
        if self._reason and threading.get_ident() not in (self._stopping_in, self._holding):
            raise StopRequested(self._reason, self._failure)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no `check` of this thread stop the block: it has changed something and must run to its end."""
        self._holding = threading.get_ident()
        try:
            yield
        finally:
            self._holding = 0

    @contextmanager
    def shield(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.check()

    def exposed(self, work: Callable[[], T]) -> T:
        """Run `work` as if no shield surrounded it: a stop interrupts it with StopRequested; then the shield is back.

        A function rather than a `with` block, on whose exit a signal could leave the shield down: once this has
        returned or raised, the rest of the shielded code is as safe as before.
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
            # A signal may arrive between two statements of the block above; a second one exits the process.
            self._depth = depth
            raise

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals during the block."""
        with handled_signals(SIGNALS, self._handle) as is_handling:
            self._is_installed = is_handling
            try:
                yield
            finally:
                self._is_installed = False
                # The process may have other work after this run, and an old timer would end it.
                if self._timer:
                    self._timer.cancel()

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
            raise StopRequested(self._reason, self._failure)

    def _start_timer(self) -> None:
        # `fail` may have started it already; a second timer would extend the grace.
        if self._timer:
            return  # `fail` started it already, in case the main thread does not react
        timer = threading.Timer(self._grace_s, self._leave, args=(f"not stopped within {self._grace_s:g} s: leaving",))
        timer.daemon = True
        timer.start()
        self._timer = timer

    def _leave(self, message: str) -> None:
        if self._is_guest and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt(message)
        if self._is_guest:
            if self._is_installed and hasattr(signal, "pthread_kill"):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        failure = f"{self._failure}\n" if self._failure else ""
        # Not print: the handler may have interrupted a print in the main thread, whose buffer is locked.
        with suppress(OSError):
            os.write(2, hide_text(f"{failure}retrain: {message}\n").encode())
        # `sys.exit` would run exit handlers, and they may hang as the run does.
        os._exit(EXIT_RESUMABLE if self._resumable and not failure else EXIT_FAILED)
