"""Hashes files within bounds, whatever is found under their names: links, FIFOs, unreadable and vanishing files."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHUNK = 2**20
SAMPLED_ABOVE = 2**30  # larger files, and those beyond this total, are sampled
BLOCKS, BLOCK_BYTES = 64, 2**16
DIGEST_BYTES = 16
COPIED_BYTES = 2**20  # a run keeps copies of files up to this size,
COPIED_TOTAL_BYTES = 2**22  # together up to this one
MAX_FILES = 10_000  # of one folder


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedFile:
    """A file and its BLAKE2b hash.

    `name` is the same on every machine (a module's path below its import root, a data file as the configuration names
    it), `path` is where it was read. With `is_sampled` the hash covers the size and some blocks, not the whole content,
    and a data file's modification time counts too. `problem` says why there is no hash. `content` is kept for a copy.
    """

    name: str
    path: str
    size: int = 0
    hash: str = ""
    is_sampled: bool = False
    mtime_ns: int = 0
    problem: str = ""
    content: bytes = field(default=b"", repr=False)

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON, by field, without the name, the content and what is empty."""
        named = {key: getattr(self, key) for key in ("path", "size", "hash", "is_sampled", "mtime_ns", "problem")}
        return {key: value for key, value in named.items() if value}


@dataclass(slots=True)
class Budget:
    """How much may still be done: bytes hashed completely, blocks of larger files hashed, bytes kept for copies."""

    whole: int = SAMPLED_ABOVE
    blocks: int = 64 * BLOCKS
    copies: int = COPIED_TOTAL_BYTES


def hash_file(
    name: str,
    path: str | Path,
    budget: Budget,
    *,
    sampled_above: int = SAMPLED_ABOVE,
    with_time: bool = True,
    is_kept: bool = True,
) -> HashedFile:
    """Hash a regular file, or say why it cannot be; never waits for a FIFO or a device.

    Beyond `sampled_above` bytes, or when the budget is used up, the hash covers the size and evenly spaced blocks, and
    `with_time` adds the modification time. `is_kept`: keep the content of a small file, for a copy.
    """
    place, name = str(path), _utf8(name)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        return HashedFile(name=name, path=_utf8(place), problem=_reason(error))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return HashedFile(name=name, path=_utf8(place), problem="not a regular file")
        size, digest, content = found.st_size, hashlib.blake2b(digest_size=DIGEST_BYTES), b""
        is_whole = size <= min(sampled_above, budget.whole)
        if not is_whole:
            blocks = min(BLOCKS, budget.blocks)
            budget.blocks -= blocks
            _add_blocks(digest, descriptor, size, blocks)
        while is_whole and (chunk := os.read(descriptor, CHUNK)):
            digest.update(chunk)
            budget.whole -= len(chunk)
            content = chunk
        is_kept = is_kept and is_whole and len(content) == size <= min(COPIED_BYTES, budget.copies)
        budget.copies -= size if is_kept else 0
        return HashedFile(
            name=name,
            path=_utf8(place),
            size=size,
            hash=digest.hexdigest(),
            is_sampled=not is_whole,
            mtime_ns=found.st_mtime_ns if with_time and not is_whole else 0,
            content=content if is_kept else b"",
        )
    except OSError as error:
        return HashedFile(name=name, path=_utf8(place), problem=_reason(error))
    finally:
        os.close(descriptor)


def _utf8(name: str) -> str:
    """A file name that is not UTF-8, with its bytes written out."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _add_blocks(digest: hashlib.blake2b, descriptor: int, size: int, blocks: int) -> None:
    """The size, then blocks evenly spaced from the first byte to the last."""
    digest.update(str(size).encode())
    last = max(size - BLOCK_BYTES, 0)
    for offset in dict.fromkeys(last * number // max(blocks - 1, 1) for number in range(blocks)):
        digest.update(os.pread(descriptor, BLOCK_BYTES, offset))


def files_below(folder: str | Path, *, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Files below a folder, sorted: no hidden ones, no byte code, nothing below `without`, which holds real paths.

    Links to files are followed, links to folders are not.
    """
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        if without:
            folders[:] = [name for name in folders if os.path.realpath(os.path.join(parent, name)) not in without]
        for name in sorted(files):
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                yield os.path.join(parent, name)
