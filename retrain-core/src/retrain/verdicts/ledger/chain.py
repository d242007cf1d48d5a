"""Appends events to `ledger.jsonl`, each with the hash of the one before, under a lock and flushed to disk.

A line is `{"time", "kind", ..., "previous", "sha256"}`: `sha256` is the hash of the line's bytes without itself,
`previous` the `sha256` of the line before, 64 zeros in the first. So an edited, dropped, added, repeated or moved line
is found; a missing tail only with a later hash. Secrets are left out as in all records.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.text.secrets import hide, redacted_json

NAME = "ledger.jsonl"
FIRST = "0" * 64
BLOCK_BYTES = 8192
PATIENCE_S, PAUSE_S = 5.0, 0.01  # for the lock, which is held for one write and one flush
SUFFIX = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
SUFFIX_BYTES = len(', "sha256": ""}\n') + 64


def append(folder: Path, kind: str, **fields: Any) -> str:
    """Append an event to the ledger in `folder`; return why that failed, or nothing.

    `fields` are plain data. Only the end of the file is read. A last line that a kill tore is removed first, and the
    event records it (`healed`: bytes): it was never on record.
    """
    content = as_recorded(hide(fields))
    try:
        with _locked(folder / NAME) as descriptor:
            size = os.fstat(descriptor).st_size
            last = _last_line(descriptor, size)
            if last and not last.endswith(b"\n"):
                os.ftruncate(descriptor, size - len(last))
                content["healed"] = len(last)
                last = _last_line(descriptor, size - len(last))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"time": now, "kind": kind, **content, "previous": hash_of_line(last)}
            body = redacted_json([record])[0].encode("utf-8", "backslashreplace")
            sha256 = hashlib.sha256(body).hexdigest()
            _write(descriptor, body[:-1] + f', "sha256": "{sha256}"}}\n'.encode("ascii"))
    except OSError as error:
        return f"{folder / NAME} cannot be written: {error.strerror or error}"
    return ""


def hash_of_line(line: bytes) -> str:
    """Return the hash that a line states; without one, that of its bytes, so that the chain continues after damage."""
    if not line:
        return FIRST
    found = SUFFIX.fullmatch(line[-SUFFIX_BYTES:])
    return found[1].decode("ascii") if found else hashlib.sha256(line).hexdigest()


def as_recorded(value: Any) -> Any:
    """Return plain data with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): as_recorded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_recorded(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """Yield a descriptor of the ledger that no other process writes to meanwhile; OSError when that takes too long."""
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
    """Return the last line, whole or torn, of a file of `size` bytes, read from its end."""
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
