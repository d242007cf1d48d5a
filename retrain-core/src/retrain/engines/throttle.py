"""A fair limit on how many processes of one machine call a remote service at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import BackendError, Problem

PAUSES_S = (0.005, 0.2)  # between two searches for a free slot: the first pause and the longest
TICKET = "ticket_{:012d}.lock"


class Throttle:
    """At most `max_concurrent` blocks `with throttle.slot():` at a time, over all processes that share a folder.

    Slots are granted in the order of the requests. Each claim is an operating-system lock on a file, so it ends with
    its process, however that dies. Without a folder nothing is limited. Threads count like processes; do not request a
    slot inside a slot. BackendError when the folder cannot be used.
    """

    def __init__(self, folder: str | Path, max_concurrent: int) -> None:
        self._folder = Path(folder).expanduser() if str(folder) else None
        self._count = max_concurrent

    @classmethod
    def from_config(cls, config: Config) -> Throttle:
        """Return the throttle of `[backend] throttle_dir` and `max_concurrent`."""
        return cls(config.backend.throttle_dir, config.backend.max_concurrent)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Wait for a slot and hold it for the duration of the block."""
        if self._folder is None:
            yield
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = self._wait(self._folder)
        except OSError as error:
            what = f"the throttle folder cannot be used: {error.strerror or error}"
            fix = "choose a local folder that you can write to, or leave [backend] throttle_dir empty"
            where = str(self._folder)
            raise BackendError(Problem(code="backend.throttle-folder", where=where, what=what, fix=fix)) from error
        try:
            yield
        finally:
            _release(held)

    def _wait(self, folder: Path) -> BinaryIO:
        number, ticket = _draw_ticket(folder)
        try:
            while (before := _ticket_before(folder, number)) is not None:
                # Released on a slot, an abort or a death; another ticket may then be ahead.
                with before:
                    fcntl.flock(before, fcntl.LOCK_SH)
            # Only the head of the queue searches for a free slot.
            pause_s, longest_s = PAUSES_S
            while True:
                for index in range(self._count):
                    stream = (folder / f"slot_{index}.lock").open("ab")
                    if _try_lock(stream):
                        return stream
                    stream.close()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        finally:
            with suppress(OSError):
                (folder / TICKET.format(number)).unlink()
            _release(ticket)


def _draw_ticket(folder: Path) -> tuple[int, BinaryIO]:
    """Return a number above all waiting ones, and the lock that claims it."""
    with _exclusively(folder):
        number = max(_numbers(folder), default=0) + 1
        stream = (folder / TICKET.format(number)).open("ab")
        fcntl.flock(stream, fcntl.LOCK_EX)
        return number, stream


def _ticket_before(folder: Path, number: int) -> BinaryIO | None:
    """Return the nearest earlier ticket whose owner still waits; tickets of dead processes are removed."""
    with _exclusively(folder):
        # Each waits for its neighbour only, so that a freed slot wakes one process instead of all.
        for other in sorted((n for n in _numbers(folder) if n < number), reverse=True):
            file = folder / TICKET.format(other)
            try:
                stream = file.open("rb")
            except FileNotFoundError:  # its owner has a slot by now
                continue
            if not _try_lock(stream):
                return stream
            file.unlink(missing_ok=True)
            stream.close()
    return None


def _numbers(folder: Path) -> list[int]:
    return [int(digits) for file in folder.glob("ticket_*.lock") if (digits := file.stem.partition("_")[2]).isdigit()]


@contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    with (folder / "queue.lock").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _try_lock(stream: BinaryIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(stream: BinaryIO) -> None:
    with suppress(OSError):
        # Closing does not unlock where a child process inherited the file.
        fcntl.flock(stream, fcntl.LOCK_UN)
    stream.close()
