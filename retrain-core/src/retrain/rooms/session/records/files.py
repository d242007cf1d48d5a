"""Writes that are whole or absent: temporary name, flush to disk, rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.errors import Problem, RecordError
from retrain.rooms.text.whole_file import write_bytes

REPLACED = ".old"


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text`; a reader sees the old content or the new, never a part."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file; ValueError on NaN or infinity, which JSON does not have."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make `path` a folder that `fill` wrote; it becomes visible when it is complete and on disk.

    A folder that it replaces is `.<name>.old` between two renames: whoever finds that one alone has the old content.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        _sync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # half a checkpoint must not keep the room that a whole one needs
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
    """Bring the names in a folder to the disk: a rename that is not there is lost when the power fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: Path) -> None:
    for entry in (path, *path.rglob("*")):
        sync_folder(entry)  # a file is opened and synced in the same way


class JsonLines:
    """A JSONL file that grows by whole lines: a batch of them is one write, and one that fails leaves nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._stream = path.open("ab", buffering=0)  # nothing waits in memory, so nothing is written twice or late

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; ValueError on NaN or infinity, RecordError when the disk refuses, with nothing written."""
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
        rest = memoryview("".join(f"{line}\n" for line in lines).encode("utf-8"))
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
        """Bring all lines to the disk."""
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._stream.close()


def cannot_write(path: Path, error: OSError) -> RecordError:
    """The error for a record that the disk refuses."""
    fix = "free some space or mend the folder, then `retrain --resume RUN`: checkpoints and earlier records are whole"
    return RecordError(Problem(where=str(path), what=f"cannot be written: {error.strerror or error}", fix=fix))
