"""One run as its page asks for it: how it stands, its rows, and a few completions of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.records.reading import number
from retrain.records.record_names import GENERATIONS, METRICS
from retrain.records.run import Run, is_run
from retrain.records.runs.run_status import status_of_run
from retrain.report.chart_specs import LEARNING, ChartSpec, part_charts, set_charts
from retrain.report.completions import STEP_BYTES, Card, card_of, record_of
from retrain.report.step_offsets import last_step, lines_of
from retrain.report.text import Excerpt, plain
from retrain.report.watch.tail import Tail

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
                if record is None or not _is_shown(
                    sample := card_of(record, kind="", offset=offset), shown, correct_above
                ):
                    continue
                if first <= count < first + AT_A_TIME:
                    items.append(_item(sample, correct_above))
                count += 1
    except OSError:  # removed meanwhile
        return {"step": step, "first": first, "count": 0, "items": [], "is_cut": False}
    return {"step": step, "first": first, "count": count, "items": items, "is_cut": size > STEP_BYTES}


def _is_shown(sample: Card, shown: str, correct_above: float) -> bool:
    if shown == "not trained":
        return not sample.trained
    return shown == "all" or (sample.reward is not None and (sample.reward > correct_above) == (shown == "right"))


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
