"""The data of a run for its live page: its state, its rows, and a few completions of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.records.reading import number, parse_record
from retrain.records.record_names import GENERATIONS, METRICS
from retrain.records.run import Run, is_run
from retrain.records.runs.run_status import status_of_run
from retrain.report.chart_specs import FIELDS, LEARNING, RATIOS, ChartSpec, named_fields, part_charts, set_charts
from retrain.report.completions import STEP_BYTES, Card, card_of, last_step, lines_of, record_of
from retrain.report.parts import Excerpt, plain

AT_A_TIME = 12  # completions
SHOWN = ("all", "right", "wrong", "not trained")
# Paths and process ids of this machine are of no use on the page, and need not leave the process.
NOT_SENT = ("path", "pid", "trainer", "accepted")


class WatchedRun:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / METRICS)
        self._generations = folder / GENERATIONS

    def data(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the state of the run, and the rows that the page does not have yet."""
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
        """Return completions `first` and following of a step, among those `shown`: all, right, wrong or not trained.

        `items` are their texts and numbers, `count` is the number of all; with `is_cut` not all of the step was read.
        """
        step, first, shown = max(_int(query, "step"), 0), max(_int(query, "first"), 0), query.get("shown", "all")
        correct_above = number(Run(self._folder).table("scoring").get("correct_above")) or 0.0
        items: list[dict[str, Any]] = []
        count = size = 0
        # The file may have been removed since the page was opened.
        with suppress(OSError), open_regular(self._generations) as stream:
            for offset, line in lines_of(stream, step, most_bytes=STEP_BYTES):
                size += len(line)
                if (record := record_of(line)) is None:
                    continue
                item = _item(card_of(record, kind="", offset=offset), correct_above)
                right = item["is_right"]
                kinds = {"not trained": not item["trained"], "right": right is True, "wrong": right is False}
                if not kinds.get(shown, True):
                    continue
                if first <= count < first + AT_A_TIME:
                    items.append(item)
                count += 1
        return {"step": step, "first": first, "count": count, "items": items, "is_cut": size > STEP_BYTES}

    def _status(self) -> dict[str, Any]:
        if not is_run(self._folder):
            return {"status": "gone"}
        found = status_of_run(self._folder).as_data()
        progress = {
            name: plain(value) if isinstance(value, str) else number(value) for name, value in found["progress"].items()
        }
        shown = {
            name: plain(value, 2000) if isinstance(value, str) else value
            for name, value in found.items()
            if name not in NOT_SENT
        }
        return shown | {"progress": progress, "model": plain(Run(self._folder).table("model").get("model", ""))}


def _int(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    # isdigit also accepts digits of other scripts, and int() takes quadratic time for long ones.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1


def chart_data(spec: ChartSpec, group: str) -> dict[str, Any]:
    """Return a chart for the script; names of parts and sets come from plugins."""
    texts = {"group": group, "title": plain(spec.title), "note": spec.note, "unit": spec.unit.value}
    return texts | {"fields": spec.fields, "is_graded": spec.is_graded, "is_pooling": spec.is_pooling}


def _item(sample: Card, correct_above: float) -> dict[str, Any]:
    names = {name: plain(getattr(sample, name)) for name in ("group", "index", "example_id", "outcome", "stop_reason")}
    texts = {}
    for name in ("prompt", "completion", "reference", "detail"):
        excerpt: Excerpt = getattr(sample, name)
        head, tail = (plain(part, len(part), kept="\n\t") for part in (excerpt.head, excerpt.tail))
        texts[name] = {"head": head, "tail": tail, "left_out": excerpt.left_out}
    return {
        **texts,
        **names,
        "reward": sample.reward,
        "is_right": None if sample.reward is None else sample.reward > correct_above,
        "num_tokens": sample.num_tokens,
        "trained": sample.trained,
        "parts": {plain(name): value for name, value in sample.rewards.items()},
    }


# The numbers of a run as it writes them: each look reads only the new part of `metrics.jsonl`.

# A long record takes several looks, so that no request blocks for seconds.
LOOK_BYTES = 16 << 20
# A longer record loses every second row, repeatedly: more points than pixels only slow the browser.
MOST_ROWS = 4_000
# Read again before the new part: a resumed run may have rewound the file and extended it since.
SEAM_BYTES = 256
Row = Mapping[str, float]


class Tail:
    """The rows of a run: step, and the numbers that charts show.

    `generation` changes when rows that were given out no longer hold: the file was replaced or rewound, or rows were
    thinned. Safe to use from several threads.
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
        """Return the current generation, the index of the first returned row, and the rows after `count` known ones."""
        with self._lock:
            self._look()
            first = count if generation == self.generation and 0 <= count <= len(self.rows) else 0
            return self.generation, first, self.rows[first:]

    @property
    def names(self) -> set[str]:
        with self._lock:
            return {name for row in self.rows for name in row}

    def _look(self) -> None:
        """Read the new part of the file, or all of it if it was replaced or rewound."""
        try:
            with open_regular(self._file) as stream:
                info = os.fstat(stream.fileno())
                identity = info.st_dev, info.st_ino
                stream.seek(self._offset - len(self._seam))
                # The size does not show a rewind: the file may have grown past the old end.
                is_continued = info.st_size >= self._offset and stream.read(len(self._seam)) == self._seam
                if identity != self._identity or not is_continued:
                    self._identity = identity
                    self._offset, self._seam, self._stride, self._since_kept = 0, b"", 1, 0
                    self.rows = []
                    self.generation += 1
                stream.seek(self._offset)
                block = stream.read(LOOK_BYTES)
        except OSError:  # the file does not exist yet, or was removed: earlier rows stay
            return
        end = block.rfind(b"\n") + 1
        if not end and len(block) == LOOK_BYTES:
            # A line longer than a look holds no step, and waiting for its end would stop the page for good.
            end = len(block)
        for line in block[:end].splitlines():
            self._take(line)
        self._offset += end
        self._seam = (self._seam + block[:end])[-SEAM_BYTES:]

    def _take(self, line: bytes) -> None:
        try:
            record = parse_record(line, allow_nan=True, allow_overflow=True)
        except (ValueError, RecursionError):  # a damaged line hides no other
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
    """Return the numbers that charts show, with counts as shares or as a speed."""
    named = ((name, number(record.get(name))) for name in dict.fromkeys(("step", *FIELDS, *named_fields(record))))
    row = {name: value for name, value in named if value is not None}
    totals = {name: sum(row.get(each, 0.0) for each in fields) for name, fields in RATIOS.items()}
    shown = {name: row[name] / total for name, total in totals.items() if name in row and total > 0}
    return {name: value for name, value in row.items() if name not in RATIOS} | shown
