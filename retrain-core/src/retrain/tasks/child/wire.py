"""The format between a run and its child processes: length-prefixed frames of tagged JSON.

JSON has no NaN, no tuples, and only text as keys; here they arrive unchanged, because a changed value could turn a
failure into a number. Values that JSON knows look like JSON; any other is an object with one key that starts with "!".
Only the classes listed here can be sent: nothing from a child is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from retrain.kernel.contracts.tasks import Action, EpisodeResult, LoadedData, Observation
from retrain.kernel.errors import Problem
from retrain.kernel.types import Example, Outcome, Score, StopReason

RECORDS: dict[str, type[Any]] = {
    record.__name__: record for record in (Example, Score, Observation, Action, EpisodeResult, LoadedData, Problem)
}
ENUMS: Mapping[tuple[str, str], type[Outcome] | type[StopReason]] = {
    ("Score", "outcome"): Outcome,
    ("Action", "stop_reason"): StopReason,
}
# Integers up to 2**53 are the same in every JSON reader; larger ones go as hex, without a limit of digits.
PLAIN_BITS = 53
# Above this a header is garbage: user code may write to the descriptor.
MAX_FRAME_BYTES = 2**30
HEADER_BYTES = 8
# Memory grows with the bytes received, never with the length that a header claims.
CHUNK_BYTES = 2**20


class WireError(Exception):
    """A frame that cannot be read: too long, not our JSON, or with an unknown tag."""


def dumps(value: object) -> bytes:
    # ASCII only: lone surrogates and null bytes travel as escapes.
    return json.dumps(encode(value)).encode("ascii")


def loads(content: bytes) -> Any:
    try:
        return decode(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error


def encode(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # subclasses (enumerations, numpy's strings) as their base class
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= PLAIN_BITS else {"!int": hex(value)}
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, tuple):
        return {"!tuple": [encode(each) for each in value]}
    if isinstance(value, Mapping):
        if all(isinstance(name, str) and not name.startswith("!") for name in value):
            return {str(name): encode(each) for name, each in value.items()}
        return {"!dict": [[encode(name), encode(each)] for name, each in value.items()]}
    if isinstance(value, np.generic) and not isinstance(value, np.bytes_ | np.void | np.complexfloating):
        return encode(value.item())
    name = type(value).__name__
    if isinstance(value, LoadedData) and value.reward is not None:
        name = "LoadedData with a reward"
    elif type(value) in RECORDS.values():
        return {f"!{name}": {field.name: encode(getattr(value, field.name)) for field in fields(value)}}
    raise TypeError(f"a {name} cannot be sent to another process")


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("!"):
        return {name: decode(each) for name, each in value.items()}
    content = value[tag]
    if tag == "!tuple":
        return tuple(decode(each) for each in content)
    if tag == "!dict":
        return {decode(name): decode(each) for name, each in content}
    if tag == "!int":
        return int(content, 16)
    named = {name: ENUMS.get((tag[1:], name), decode)(each) for name, each in content.items()}
    return RECORDS[tag[1:]](**named)


def send(connection: socket.socket, content: bytes, *, timeout_s: float | None) -> None:
    connection.settimeout(timeout_s)
    connection.sendall(len(content).to_bytes(HEADER_BYTES, "big") + content)


def receive(connection: socket.socket, *, timeout_s: float | None) -> bytes | None:
    """Read one frame, None when the other side is gone; TimeoutError when it does not arrive in time."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    header = _read(connection, HEADER_BYTES, deadline)
    if header is None:
        return None
    size = int.from_bytes(header, "big")
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {size} bytes")
    return _read(connection, size, deadline)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0.0:
            raise TimeoutError
        connection.settimeout(left_s)
        try:
            chunk = connection.recv(min(CHUNK_BYTES, size - len(content)))
        except ConnectionError:
            return None
        if not chunk:
            return None
        content += chunk
    return bytes(content)
