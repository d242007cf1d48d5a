"""One run as its page asks for it: how it stands, its rows, and a few completions of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from retrain.kernel.config.toml_file import open_regular
from retrain.records.reading import number, parse_record
from retrain.records.record_names import GENERATIONS, METRICS
from retrain.records.run import Run, is_run
from retrain.records.runs.run_status import status_of_run
from retrain.report.chart_specs import FIELDS, LEARNING, RATIOS, ChartSpec, named_fields, part_charts, set_charts
from retrain.report.completions import STEP_BYTES, Card, card_of, last_step, lines_of, record_of
from retrain.report.text import Excerpt, plain

AT_A_TIME = 12  # completions
SHOWN = ("all", "right", "wrong", "not trained")
NOT_SENT = ("path", "pid", "trainer", "accepted")  # of a status: nothing that the page shows


class WatchedRun:
    """Reads the files of the run in `folder` when the page asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / METRICS)
        self._generations = folder / GENERATIONS

    def data(self, query: Mapping[str, str]) -> dict[str, Any]:
        """How the run stands, and the rows that the page has not got yet."""
        generation, first, rows = self._tail.since(_int(query, "generation"), _int(query, "rows"))
        names = self._tail.names
        return {
            "status": self._status(),
            "generation": generation,
            "first": first,
            "rows": rows,
            "newest_step": last_step(self._generations),
            "charts": [chart_data(spec, LEARNING) for spec in (*set_charts(names), *part_charts(names))],
        }

    def completions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A few completions of a step."""
        shown = query.get("shown", "all")
        return completions_of(
            self._generations,
            max(_int(query, "step"), 0),
            first=max(_int(query, "first"), 0),
            shown=shown if shown in SHOWN else "all",
            correct_above=self._number("scoring", "correct_above", 0.0),
        )

    def _status(self) -> dict[str, Any]:
        if not is_run(self._folder):
            return {"status": "gone"}
        found = status_of_run(self._folder).as_data()
        kept = {name: value for name, value in found.items() if name not in NOT_SENT}
        progress = {
            name: plain(value) if isinstance(value, str) else number(value) for name, value in found["progress"].items()
        }
        shown = {name: plain(value, 2000) if isinstance(value, str) else value for name, value in kept.items()}
        return shown | {"progress": progress, "model": plain(Run(self._folder).table("model").get("model", ""))}

    def _number(self, table: str, key: str, default: float) -> float:
        found = number(Run(self._folder).table(table).get(key))
        return default if found is None else found


def _int(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1


def chart_data(spec: ChartSpec, group: str) -> dict[str, Any]:
    """A chart as the script draws it; names of parts and sets are a plugin's."""
    texts = {"group": group, "title": plain(spec.title), "note": spec.note, "unit": spec.unit.value}
    return texts | {"fields": spec.fields, **{name: getattr(spec, name) for name in ("is_graded", "is_pooling")}}


def completions_of(file: Path, step: int, *, first: int, shown: str, correct_above: float) -> dict[str, Any]:
    """Completions `first` and following of a step, of those `shown`: all, right, wrong or not trained.

    `items` are their texts and numbers, `count` how many there are, and `is_cut` whether the step is larger than read.
    """
    items: list[dict[str, Any]] = []
    count = size = 0
    try:
        with open_regular(file) as stream:
            for offset, line in lines_of(stream, step, most_bytes=STEP_BYTES):
                size += len(line)
                record = record_of(line)
                if record is None:
                    continue
                item = _item(card_of(record, kind="", offset=offset), correct_above)
                right = item["is_right"]
                kinds = {"not trained": not item["trained"], "right": right is True, "wrong": right is False}
                if not kinds.get(shown, True):
                    continue
                if first <= count < first + AT_A_TIME:
                    items.append(item)
                count += 1
    except OSError:  # removed meanwhile
        return {"step": step, "first": first, "count": 0, "items": [], "is_cut": False}
    return {"step": step, "first": first, "count": count, "items": items, "is_cut": size > STEP_BYTES}


def _item(sample: Card, correct_above: float) -> dict[str, Any]:
    texts = {name: _excerpt(getattr(sample, name)) for name in ("prompt", "completion", "reference", "detail")}
    names = {name: plain(getattr(sample, name)) for name in ("group", "index", "example_id", "outcome", "stop_reason")}
    return {
        **texts,
        **names,
        "reward": sample.reward,
        "is_right": None if sample.reward is None else sample.reward > correct_above,
        "num_tokens": sample.num_tokens,
        "trained": sample.trained,
        "parts": {plain(name): value for name, value in sample.rewards.items()},
    }


def _excerpt(value: Excerpt) -> dict[str, Any]:
    head, tail = (plain(part, len(part), kept="\n\t") for part in (value.head, value.tail))
    return {"head": head, "tail": tail, "left_out": value.left_out}


# The numbers of a run as it writes them: each look reads what `metrics.jsonl` got since the last one, no more.


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
