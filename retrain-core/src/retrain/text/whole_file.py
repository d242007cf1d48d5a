"""Writes a file that is whole or absent: temporary name, flush to disk, rename."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by `content`; a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # on a full disk every byte counts
        raise
