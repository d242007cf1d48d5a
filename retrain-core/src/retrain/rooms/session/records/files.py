"""Atomic writes: temporary name, flush to disk, rename. Known secrets are left out of all text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.errors import Problem, RecordError
from retrain.rooms.text.secrets import redacted, redacted_json
from retrain.rooms.text.whole_file import write_bytes

REPLACED = ".old"


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text`; a reader sees the old content or the new, never a mixture."""
    write_bytes(path, redacted(text).encode("utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file; ValueError on NaN or infinity, which JSON does not have."""
    write_bytes(path, f"{redacted_json([content], indent=2)[0]}\n".encode())


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make `path` a folder that `fill` writes; it becomes visible once it is complete and on disk.

    Between two renames a replaced folder is named `.<name>.old`: found alone, it holds the old content.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        _sync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # half a checkpoint must not occupy space that a whole one needs
        raise
    if path.exists():
        outdated = path.with_name(f".{path.name}{REPLACED}")
        shutil.rmtree(outdated, ignore_errors=True)
        path.rename(outdated)
        temporary.rename(path)
        shutil.rmtree(outdated)
    else:
        temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk; otherwise a power failure can undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: Path) -> None:
    for entry in (path, *path.rglob("*")):
        sync_folder(entry)  # works for files as well


class JsonLines:
    """A JSONL file that grows by whole lines: a batch is one write, and a failed write leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._stream = path.open("ab", buffering=0)  # without a buffer nothing is written twice or late

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; ValueError on NaN or infinity, RecordError when the write fails: then nothing is written."""
        rest = memoryview("".join(f"{line}\n" for line in redacted_json(records)).encode("utf-8"))
        try:
            size = os.fstat(self._stream.fileno()).st_size
            try:
                while rest:
                    rest = rest[self._stream.write(rest) :]
            except OSError:
                os.ftruncate(self._stream.fileno(), size)
                raise
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def sync(self) -> None:
        """Flush all lines to disk."""
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._stream.close()


def cannot_write(path: Path, error: OSError) -> RecordError:
    """The error for a record that could not be written."""
    fix = "free space or repair the folder, then `retrain --resume RUN`: checkpoints and earlier records are intact"
    return RecordError(Problem(where=str(path), what=f"cannot be written: {error.strerror or error}", fix=fix))
