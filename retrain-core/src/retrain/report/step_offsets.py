"""Finds a step in `generations.jsonl` by bisection, with a few dozen reads even in a file of gigabytes.

Lines are ordered by step, and each begins with its step: `{"step": 12, ...`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from retrain.kernel.errors import ConfigError
from retrain.records.reading import last_record

HEAD = re.compile(rb'\{"step": (-?\d{1,18}),')
LINE_BYTES = 16 << 20  # longer lines are skipped


def last_step(file: Path) -> int | None:
    """The step of the last line; None without a line that can be read."""
    with suppress(ConfigError):
        step = (last_record(file, skip_damaged=True) or {}).get("step")
        return step if type(step) is int else None
    return None


def first_offset(stream: BinaryIO, step: int) -> int:
    """Offset of the first line of `step` or a later one; the end of the file if there is none."""
    low, high = 0, stream.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        start, found = _next_line(stream, middle)
        if found is None or found >= step:
            high = middle
        else:
            low = start + 1
    return _next_line(stream, low)[0]


def lines_of(stream: BinaryIO, step: int, *, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each whole line of a step, at most `most_bytes` of them; lines beyond 16 MB are empty."""
    offset = end = first_offset(stream, step)
    stream.seek(offset)
    while offset - end <= most_bytes:
        line = stream.readline(LINE_BYTES)
        head = HEAD.match(line)
        if not head or int(head[1]) != step:
            return
        size, is_whole = len(line), line.endswith(b"\n")
        while line and not line.endswith(b"\n"):
            line = stream.readline(LINE_BYTES)
            size += len(line)
        if not line:  # cut short by a kill
            return
        yield offset, (b"" if not is_whole else line)
        offset += size


def _next_line(stream: BinaryIO, position: int) -> tuple[int, int | None]:
    """Offset and step of the first line with a step that begins at `position` or later; the file's end without one."""
    stream.seek(max(0, position - 1))
    if position:
        stream.readline()  # to the line break before the first candidate
    start = stream.tell()
    while line := stream.readline():
        if head := HEAD.match(line):
            return start, int(head[1])
        start += len(line)
    return start, None
