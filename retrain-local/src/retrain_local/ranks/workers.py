"""Rank 0's side of the other ranks: their processes, and the messages, pickled from process to child."""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from pydantic import BaseModel

from retrain.api import BackendError, Config, Problem, RetrainError, Sample, Seeds
from retrain_local.devices.group import PeerFailedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a worker: its rank, and the inputs of the backend."""

    rank: int
    port: int
    threads: int
    config: Config
    seeds: Seeds
    params: BaseModel | None
    stop_id: int | None  # end-of-sequence id of the tokenizer, all that a backend reads of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method of the worker's backend, and its arguments; the answer has the same number."""

    number: int
    name: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the call in progress where it may stop; the worker ignores it after the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    number: int
    request: int
    place: int
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a call, or its error; -1 answers `Start`."""

    number: int = -1
    value: Any = None
    error: RetrainError | None = None


class StoppedError(BackendError):
    """Rank 0 has stopped the call in progress."""


def send(connection: Connection, message: Any) -> None:
    """Send one message; BrokenPipeError when the other process is gone."""
    text = io.BytesIO()
    _Pickler(text, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(text.getbuffer())


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


class _Pickler(pickle.Pickler):
    """Pickles config tables, whose classes are made at run time from the keys of several plugins."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        found = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
        if not isinstance(value, BaseModel) or found is kind:
            return NotImplemented
        return _empty, (kind.__name__, kind.__bases__), value.__getstate__()


def _empty(name: str, bases: tuple[type[BaseModel], ...]) -> BaseModel:
    kind: type[BaseModel] = type(name, bases, {})
    return kind.__new__(kind)


log = logging.getLogger("retrain")
POLL_S = 0.2
CLOSE_S = 10.0  # for a worker to end by itself; then it is killed


class LostRankError(BackendError):
    """A worker has ended, so the run cannot continue."""


class Worker:
    def __init__(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.rank, self.process, self._connection = rank, process, connection
        self._numbers, self._current = count(), -1

    def call(self, name: str, *args: Any) -> None:
        self._current = next(self._numbers)
        self.send(Call(number=self._current, name=name, args=args))

    def send(self, message: Any) -> None:
        try:
            send(self._connection, message)
        except OSError:
            raise self.lost() from None

    def next(self, check: Callable[[], None] = lambda: None) -> Any:
        """Return the next message of the call in progress, calling `check` while waiting; LostRankError when gone."""
        while True:
            try:
                while not self._connection.poll(POLL_S):
                    check()
                found = receive(self._connection)
            except (EOFError, ConnectionError):
                raise self.lost() from None
            # Other messages belong to a call whose caller was interrupted.
            if found.number == self._current:
                return found

    def answer(self, check: Callable[[], None] = lambda: None) -> Any:
        found = self.next(check)
        while not isinstance(found, Answer):
            found = self.next(check)
        if found.error is not None:
            raise found.error
        return found.value

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise self.lost()

    def lost(self) -> LostRankError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_S)
        code = self.process.returncode
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        how = f"was killed by signal {-code}" if code is not None and code < 0 else how
        what = f"rank {self.rank} (process {self.process.pid}) {how}"
        fix = "look for its own messages above and for the system's (out of memory?), then continue with --resume"
        return LostRankError(Problem(code="backend.rank-lost", where="[backend] devices", what=what, fix=fix))

    def end(self) -> None:
        self._connection.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Workers:
    def __init__(self) -> None:
        self._all: list[Worker] = []

    def start(self, start: Callable[[int], Start], size: int) -> None:
        """Start ranks 1 to `size` - 1, and wait until they are ready to join the group."""
        for rank in range(1, size):
            message = start(rank)
            # the variables that torchrun sets
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            numbers["MASTER_PORT"] = message.port
            here, there = Pipe()
            with there:
                process = subprocess.Popen(
                    [sys.executable, "-m", "retrain_local.ranks.worker", str(there.fileno())],
                    env={**os.environ, **{name: str(n) for name, n in numbers.items()}, "MASTER_ADDR": "127.0.0.1"},
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's interrupt is for rank 0
                )
            log.info("Rank %d of %d is process %d.", rank, size, process.pid)
            self._all.append(Worker(rank, process, here))
            self._all[-1].send(message)
        self.answers()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def check_alive(self) -> None:
        for worker in self._all:
            worker.check_alive()

    def answers(self) -> list[Any]:
        """Return the results of the call in progress, once all have answered."""
        # a rank that failed is reported, not one that waited for it
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
        """Return why one of them has failed, if it has; rank 0 itself sees no more than a broken connection."""
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
        for worker in self._all:
            worker.send(Stop())

    def kill(self) -> None:
        for worker in self._all:
            worker.process.kill()
        self.end()

    def end(self) -> None:
        workers, self._all = self._all, []
        for worker in workers:
            worker.end()
