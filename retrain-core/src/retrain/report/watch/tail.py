"""The numbers of a run as it writes them: each look reads what `metrics.jsonl` got since the last one, no more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from retrain.kernel.config.toml_file import open_regular
from retrain.records.reading import number, parse_record
from retrain.report.chart_specs import FIELDS, RATIOS, named_fields

LOOK_BYTES = 16 << 20  # read at most in one look; a long record is taken in by several
MOST_ROWS = 4_000  # kept; of a longer record every second row is dropped, then every second of those
SEAM_BYTES = 256  # read again before what is new: a resumed run may have rewound the file and grown it since
Row = Mapping[str, float]


class Tail:
    """The rows of a run: step, and the numbers that charts show.

    `generation` changes when earlier rows are no longer those that were given out: the file was replaced or rewound, or
    rows were thinned. Safe to use from several threads.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = Lock()
        self._identity: tuple[int, int] | None = None
        self._offset, self._seam = 0, b""
        self._stride, self._since_kept = 1, 0
        self.generation = 0
        self.rows: list[Row] = []

    def since(self, generation: int, count: int) -> tuple[int, int, list[Row]]:
        """The generation now, the index of the first row given, and the rows that a reader of `count` lacks."""
        with self._lock:
            self._look()
            first = count if generation == self.generation and 0 <= count <= len(self.rows) else 0
            return self.generation, first, self.rows[first:]

    @property
    def names(self) -> set[str]:
        """Every field that some row has."""
        with self._lock:
            return {name for row in self.rows for name in row}

    def _look(self) -> None:
        try:
            with open_regular(self._file) as stream:
                if not self._continues(stream):
                    self._start_over(stream)
                stream.seek(self._offset)
                block = stream.read(LOOK_BYTES)
        except OSError:  # not there yet, or not any more: what was read stays
            return
        end = block.rfind(b"\n") + 1
        if not end and len(block) == LOOK_BYTES:
            end = len(block)  # a line that no record needs
        for line in block[:end].splitlines():
            self._take(line)
        self._offset += end
        self._seam = (self._seam + block[:end])[-SEAM_BYTES:]

    def _continues(self, stream: BinaryIO) -> bool:
        info = os.fstat(stream.fileno())
        if (info.st_dev, info.st_ino) != self._identity or info.st_size < self._offset:
            return False
        stream.seek(self._offset - len(self._seam))
        return stream.read(len(self._seam)) == self._seam

    def _start_over(self, stream: BinaryIO) -> None:
        info = os.fstat(stream.fileno())
        self._identity = info.st_dev, info.st_ino
        self._offset, self._seam, self._stride, self._since_kept = 0, b"", 1, 0
        self.rows = []
        self.generation += 1

    def _take(self, line: bytes) -> None:
        try:
            record = parse_record(line, allow_nan=True, allow_overflow=True)
        except (ValueError, RecursionError):  # damaged; the other lines are still worth a look
            return
        if type(record.get("step")) is not int:
            return
        self._since_kept += 1
        if self._since_kept < self._stride and not _is_evaluated(record):
            return
        self._since_kept = 0
        self.rows.append(_row(record))
        if len(self.rows) > MOST_ROWS:
            self.rows = [row for at, row in enumerate(self.rows) if at % 2 == 0 or _is_evaluated(row)]
            self._stride *= 2
            self.generation += 1


def _is_evaluated(row: Mapping[str, Any]) -> bool:
    return "eval_correct_rate" in row or "eval_time_s" in row


def _row(record: Mapping[str, Any]) -> Row:
    """The numbers that charts show; counts as the shares and the speed that they show instead, as the report does."""
    named = ((name, number(record.get(name))) for name in dict.fromkeys(("step", *FIELDS, *named_fields(record))))
    row = {name: value for name, value in named if value is not None}
    totals = {name: sum(row.get(each, 0.0) for each in fields) for name, fields in RATIOS.items()}
    shown = {name: row[name] / total for name, total in totals.items() if name in row and total > 0}
    return {name: value for name, value in row.items() if name not in RATIOS} | shown
