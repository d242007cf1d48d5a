"""One run as its page asks for it: how it stands, its rows, and a few completions of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.reading import number, read_object
from retrain.records.record_names import GENERATIONS, METRICS, RUN_FILE
from retrain.records.runs.run_status import read_run
from retrain.report.chart_specs import LEARNING, part_charts, set_charts
from retrain.report.text import plain
from retrain.report.watch.browse import SHOWN, completions, newest_step
from retrain.report.watch.page import chart_data
from retrain.report.watch.tail import Tail

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
            "newest_step": newest_step(self._generations),
            "charts": [chart_data(spec, LEARNING) for spec in (*set_charts(names), *part_charts(names))],
        }

    def completions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A few completions of a step."""
        shown = query.get("shown", "all")
        return completions(
            self._generations,
            max(_int(query, "step"), 0),
            first=max(_int(query, "first"), 0),
            shown=shown if shown in SHOWN else "all",
            correct_above=self._number("scoring", "correct_above", 0.0),
        )

    def _status(self) -> dict[str, Any]:
        if not (self._folder / RUN_FILE).is_file():
            return {"status": "gone"}
        found = read_run(self._folder).as_data()
        kept = {name: value for name, value in found.items() if name not in NOT_SENT}
        progress = {
            name: plain(value) if isinstance(value, str) else number(value) for name, value in found["progress"].items()
        }
        shown = {name: plain(value, 2000) if isinstance(value, str) else value for name, value in kept.items()}
        return shown | {"progress": progress, "model": plain(self._manifest("model").get("model", ""))}

    def _number(self, table: str, key: str, default: float) -> float:
        found = number(self._manifest(table).get(key))
        return default if found is None else found

    def _manifest(self, table: str) -> Mapping[str, Any]:
        try:
            found = read_object(self._folder / RUN_FILE).get("config", {}).get(table)
        except (ConfigError, AttributeError):
            return {}
        return found if isinstance(found, dict) else {}


def _int(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
