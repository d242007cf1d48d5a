"""What passes between rank 0 and a worker over their own socket: pickled objects, from process to child."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from pydantic import BaseModel

from retrain.api import BackendError, Config, RetrainError, Sample, Seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a worker: its rank, and all that building the backend takes."""

    rank: int
    size: int
    port: int
    threads: int
    config: Config
    seeds: Seeds
    params: BaseModel | None
    stop_id: int | None  # end-of-sequence id of the tokenizer, all that a backend reads of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method of the worker's backend, and its arguments; what comes back has the same number."""

    number: int
    name: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the call in progress where it may stop; the worker ignores one that comes too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A finished sample of a call of `sample`, before its answer."""

    number: int
    request: int
    place: int
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned, or the error it ended with; -1 answers `Start`."""

    number: int = -1
    value: Any = None
    error: RetrainError | None = None


class StoppedError(BackendError):
    """Rank 0 has stopped the call that a worker was in."""


def send(connection: Connection, message: Any) -> None:
    """Send one message; BrokenPipeError when the other process is gone."""
    text = io.BytesIO()
    _Pickler(text, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(text.getbuffer())


def receive(connection: Connection) -> Any:
    """The next message; EOFError or ConnectionError when the other process is gone."""
    return pickle.loads(connection.recv_bytes())


class _Pickler(pickle.Pickler):
    """Knows the config tables that are put together at run time from the keys of several plugins."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        found = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
        if not isinstance(value, BaseModel) or found is kind:
            return NotImplemented
        return _empty, (kind.__name__, kind.__bases__), value.__getstate__()


def _empty(name: str, bases: tuple[type[BaseModel], ...]) -> BaseModel:
    kind: type[BaseModel] = type(name, bases, {})
    return kind.__new__(kind)
