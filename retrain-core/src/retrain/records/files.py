"""Writes that are whole or absent: temporary name, flush to disk, rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text`; a reader sees the old content or the new, never a part."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by `content`; a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file; ValueError on NaN or infinity, which JSON does not have."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make `path` a folder that `fill` wrote; it becomes visible when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if path.exists():
        outdated = path.with_name(f".{path.name}.old")
        shutil.rmtree(outdated, ignore_errors=True)
        path.rename(outdated)
        temporary.rename(path)
        shutil.rmtree(outdated)
    else:
        temporary.rename(path)


class JsonLines:
    """A JSONL file that grows by whole lines and is flushed after every batch of them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream: TextIO = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; ValueError on NaN or infinity, before anything of the batch is written."""
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._stream.close()
