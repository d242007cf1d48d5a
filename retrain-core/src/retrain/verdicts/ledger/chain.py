"""`ledger.jsonl`: events that each carry the hash of the one before, appended under a lock and flushed to disk.

A line is `{"time", "kind", ..., "previous", "sha256"}`: `sha256` is that of the line's bytes without itself, `previous`
the `sha256` of the line before, 64 zeros in the first. So an edited, dropped, added, repeated or moved line is found; a
tail that was cut off only by somebody who knows a later hash. Secrets are left out as in all records.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import Record, parse_record
from retrain.text.secrets import hide, redacted_json

NAME = "ledger.jsonl"
FIRST = "0" * 64
BLOCK_BYTES = 8192
PATIENCE_S, PAUSE_S = 5.0, 0.01  # for the lock, which is held for one write and one flush
SUFFIX = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
SUFFIX_BYTES = len(', "sha256": ""}\n') + 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the ledger; `fault` says how it breaks the chain, empty if it does not. A torn one has no record."""

    line: int
    record: Record
    sha256: str
    fault: str = ""
    is_torn: bool = False


def append(folder: Path, kind: str, **fields: Any) -> str:
    """Append an event to the ledger in `folder`; why that failed, or nothing. It never raises because of the disk.

    `fields` are plain data; numbers that are not finite become null. Only the end of the file is read. A last line that
    a kill tore is removed first, and the event says so (`healed`: bytes): it was never on record.
    """
    content = as_recorded(fields)
    try:
        with _locked(folder / NAME) as descriptor:
            size = os.fstat(descriptor).st_size
            last = _last_line(descriptor, size)
            if last and not last.endswith(b"\n"):
                os.ftruncate(descriptor, size - len(last))
                content["healed"] = len(last)
                last = _last_line(descriptor, size - len(last))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            line = _line({"time": now, "kind": kind, **content, "previous": _hash_of(last)})
            _write(descriptor, line)
    except OSError as error:
        return f"{folder / NAME} cannot be written: {error.strerror or error}"
    return ""


def read_chain(file: Path) -> Iterator[Entry]:
    """Every line with what is wrong with it, streamed; nothing where there is no ledger.

    After a fault the chain goes on from the hash that the line itself states, so that each fault is told once.
    ConfigError when the file cannot be read.
    """
    previous, number = FIRST, 0
    try:
        with open_regular(file) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    yield Entry(line=number, record={}, sha256=previous, is_torn=True)
                    return
                entry = _entry(number, line, previous)
                previous = entry.sha256
                yield entry
    except FileNotFoundError:
        return
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror or error}", "make it readable, or restore it from a backup"
        raise ConfigError(Problem(where=str(file), what=what, fix=fix)) from error


def _entry(number: int, line: bytes, previous: str) -> Entry:
    try:
        record = parse_record(line)
    except (ValueError, RecursionError):
        record = {}
    stated = _hash_of(line)
    fault = ""
    if not SUFFIX.fullmatch(line[-SUFFIX_BYTES:]) or not record:
        fault = "is not a line that retrain writes"
    elif hashlib.sha256(_body(line)).hexdigest() != stated:
        fault = "was edited: its hash is not that of its text"
    elif record.get("previous") != previous:
        fault = "does not follow the line before: lines were removed, added, repeated or moved"
    return Entry(line=number, record=record, sha256=stated, fault=fault)


def _line(record: Mapping[str, Any]) -> bytes:
    body = redacted_json([record])[0].encode("utf-8", "backslashreplace")
    return body[:-1] + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode("ascii")


def _body(line: bytes) -> bytes:
    return line[:-SUFFIX_BYTES] + b"}"


def _hash_of(line: bytes) -> str:
    """The hash that a line states; that of its bytes when it states none, so that the chain goes on from damage too."""
    if not line:
        return FIRST
    found = SUFFIX.fullmatch(line[-SUFFIX_BYTES:])
    return found[1].decode("ascii") if found else hashlib.sha256(line).hexdigest()


def as_recorded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they go on record: plain data without secrets, numbers that are not finite as null."""
    content: dict[str, Any] = _finite(hide(fields))
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """A descriptor of the ledger that no other process writes to meanwhile; OSError when that takes too long."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{NAME} is not a regular file")
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError("another process has held it for too long") from None
                time.sleep(PAUSE_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _last_line(descriptor: int, size: int) -> bytes:
    """The last line, whole or torn, of a file of `size` bytes; read from its end."""
    position, tail = size, b""
    while position:
        step = min(BLOCK_BYTES, position)
        position -= step
        tail = os.pread(descriptor, step, position) + tail
        start = tail.rfind(b"\n", 0, len(tail) - 1)
        if start >= 0:
            return tail[start + 1 :]
    return tail


def _write(descriptor: int, line: bytes) -> None:
    """Append a line and flush it to disk, all of it or nothing."""
    size, rest = os.fstat(descriptor).st_size, memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
