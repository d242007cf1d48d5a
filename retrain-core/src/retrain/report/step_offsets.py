"""Finds a step in `generations.jsonl` by bisection, with a few dozen reads even in a file of gigabytes.

Lines are ordered by step, and each begins with its step: `{"step": 12, ...`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO

HEAD = re.compile(rb'\{"step": (-?\d{1,18}),')
HEAD_BYTES = 64
BLOCK_BYTES = 1 << 16
LINE_BYTES = 16 << 20  # longer lines are skipped


def last_step(stream: BinaryIO) -> int | None:
    """The step of the last line that has one; None in a file without any."""
    end = stream.seek(0, os.SEEK_END)
    position = end
    while position > 0:
        position = max(0, position - BLOCK_BYTES)
        for start in reversed(list(_line_starts(stream, position, min(end, position + BLOCK_BYTES + HEAD_BYTES)))):
            if (step := _step_at(stream, start)) is not None:
                return step
    return None


def first_offset(stream: BinaryIO, step: int) -> int:
    """Offset of the first line of `step` or a later one; the end of the file if there is none."""
    low, high = 0, stream.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        start, found = _next_line(stream, middle, high)
        if found is None or found >= step:
            high = middle
        else:
            low = start + 1
    start, _ = _next_line(stream, low, stream.seek(0, os.SEEK_END))
    return start


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


def _next_line(stream: BinaryIO, position: int, end: int) -> tuple[int, int | None]:
    """The first line with a step that begins at `position` or later, and before `end`."""
    if position == 0:
        return 0, _step_at(stream, 0)
    position -= 1  # include the line break before the first candidate
    while position < end:
        stream.seek(position)
        block = stream.read(BLOCK_BYTES)
        if not block:
            break
        at = block.find(b"\n")
        while at >= 0:
            start = position + at + 1
            if start >= end:
                return end, None
            step = _step_at(stream, start)
            if step is not None:
                return start, step
            at = block.find(b"\n", at + 1)
        position += len(block)
    return end, None


def _line_starts(stream: BinaryIO, position: int, end: int) -> Iterator[int]:
    if position == 0:
        yield 0
    stream.seek(position)
    block = stream.read(end - position)
    at = block.find(b"\n")
    while at >= 0:
        yield position + at + 1
        at = block.find(b"\n", at + 1)


def _step_at(stream: BinaryIO, offset: int) -> int | None:
    stream.seek(offset)
    head = HEAD.match(stream.read(HEAD_BYTES))
    return int(head[1]) if head else None
