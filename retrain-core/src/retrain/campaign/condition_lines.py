"""Finds the line of the file on which a condition of a campaign is defined."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_HEADER = re.compile(r"^\s*\[\[\s*campaign\s*\.\s*conditions\s*\]\]")


class ConditionLines:
    """`campaign.toml:12 condition 2`, for messages; without the line if headers and conditions do not match."""

    def __init__(self, file: Path | None, count: int) -> None:
        self._file = file
        lines = _lines(file)
        starts = [number for number, line in enumerate(lines, start=1) if _HEADER.match(line)]
        self._starts = starts if len(starts) == count else []
        self._lines = lines

    def of(self, number: int, name: str = "") -> str:
        """File and line of condition `number` (from 1), or of one of its keys."""
        head = str(self._file or "[campaign]")
        if self._starts:
            head += f":{self._line(number, name)}"
        return f"{head} condition {number}"

    def _line(self, number: int, name: str) -> int:
        start = self._starts[number - 1]
        end = self._starts[number] if number < len(self._starts) else len(self._lines) + 1
        last = name.rpartition(".")[2]
        for line in range(start + 1, end):
            if last and re.match(rf"""^\s*["']?([\w.-]+\.)?{re.escape(last)}["']?\s*=""", self._lines[line - 1]):
                return line
        return start


def _lines(file: Path | None) -> Sequence[str]:
    try:
        return file.read_text(encoding="utf-8-sig").split("\n") if file else ()
    except (OSError, ValueError):
        return ()
