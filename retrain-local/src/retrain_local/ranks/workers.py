"""Rank 0's side of the other ranks: starts them, calls them, notices when one is gone, and leaves none behind."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from retrain.api import BackendError, Problem, RetrainError
from retrain_local.devices.group import PeerFailedError, torchrun_environment
from retrain_local.ranks.messages import Answer, Call, Start, Stop, receive, send

log = logging.getLogger("retrain")
POLL_S = 0.2
CLOSE_S = 10.0  # for a worker to end by itself; then it is killed
FIX = "look for its own messages above and for the system's (out of memory?), then continue with --resume"


class LostRankError(BackendError):
    """A worker has ended, so the run cannot go on."""


class Worker:
    """One other rank: its process and the socket to it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.rank, self.process, self._connection = rank, process, connection
        self._numbers, self._current = count(), -1

    def call(self, name: str, *args: Any) -> None:
        """Begin a call; `answer` waits for its end."""
        self._current = next(self._numbers)
        self.send(Call(number=self._current, name=name, args=args))

    def send(self, message: Any) -> None:
        """LostRankError when it is gone."""
        try:
            send(self._connection, message)
        except OSError:
            raise self.lost() from None

    def next(self, check: Callable[[], None] = lambda: None) -> Any:
        """Its next message of the call in progress; `check` is called while there is none. LostRankError when gone."""
        while True:
            try:
                while not self._connection.poll(POLL_S):
                    check()
                found = receive(self._connection)
            except (EOFError, ConnectionError):
                raise self.lost() from None
            if found.number == self._current:  # else of a call whose caller was interrupted
                return found

    def answer(self, check: Callable[[], None] = lambda: None) -> Any:
        """What the call returned; its error is raised."""
        found = self.next(check)
        while not isinstance(found, Answer):
            found = self.next(check)
        if found.error is not None:
            raise found.error
        return found.value

    def check_alive(self) -> None:
        """LostRankError when its process has ended."""
        if self.process.poll() is not None:
            raise self.lost()

    def lost(self) -> LostRankError:
        """The error for a worker that has ended, or whose end of the socket is closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_S)
        code = self.process.returncode
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        how = f"was killed by signal {-code}" if code is not None and code < 0 else how
        what = f"rank {self.rank} (process {self.process.pid}) {how}"
        return LostRankError(Problem(where="[backend] devices", what=what, fix=FIX))

    def end(self) -> None:
        """Let it end, kill it if it does not; it is gone afterwards."""
        self._connection.close()  # it ends when it reads that
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Workers:
    """All other ranks of a run; iterable."""

    def __init__(self) -> None:
        self._all: list[Worker] = []

    def start(self, start: Callable[[int], Start], size: int) -> None:
        """Start ranks 1 to `size` - 1, and wait until they are ready to join the group."""
        for rank in range(1, size):
            message = start(rank)
            self._all.append(_started(message))
            self._all[-1].send(message)
        self.answers()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def check_alive(self) -> None:
        """LostRankError when one has ended."""
        for worker in self._all:
            worker.check_alive()

    def answers(self) -> list[Any]:
        """What the call in progress returned on each.

        An error of theirs is raised once all have answered: that of the rank that failed, not of one that it stopped.
        """
        found, errors = [], list[RetrainError]()
        for worker in self._all:
            try:
                found.append(worker.answer(self.check_alive))
            except LostRankError:
                raise
            except RetrainError as error:
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerFailedError))
        return found

    def fault(self) -> RetrainError | None:
        """Why one of them has failed, if it has: asked when rank 0 got no more than a broken connection."""
        last = time.monotonic() + CLOSE_S

        def check() -> None:
            self.check_alive()
            if time.monotonic() > last:
                raise TimeoutError

        try:
            for worker in self._all:
                worker.answer(check)
        except RetrainError as error:
            return error
        except TimeoutError:
            pass
        return None

    def stop(self) -> None:
        """Ask all to end the call in progress."""
        for worker in self._all:
            worker.send(Stop())

    def kill(self) -> None:
        """End all of them at once."""
        for worker in self._all:
            worker.process.kill()
        self.end()

    def end(self) -> None:
        """Let all of them end; safe to call twice."""
        workers, self._all = self._all, []
        for worker in workers:
            worker.end()


def _started(start: Start) -> Worker:
    here, there = Pipe()
    with there:
        command = [sys.executable, "-m", "retrain_local.ranks.worker", str(there.fileno())]
        process = subprocess.Popen(
            command,
            env=dict(torchrun_environment(start.rank, start.size, start.port)),
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's interrupt is for rank 0
        )
    log.info("Rank %d of %d is process %d.", start.rank, start.size, process.pid)
    return Worker(start.rank, process, here)
