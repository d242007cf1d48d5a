"""The figures of the verdicts: differences with their intervals, and the seeds of both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from retrain.records.runs.metric import Metric, shown
from retrain.report.markup import plot, table
from retrain.report.text import plain, text
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.sets import SetsView
from retrain.verdicts.study.study import Study

KINDS: Mapping[Verdict, str] = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.PRACTICALLY_SAME: "same",
    Verdict.CANNOT_TELL: "open",
}
MOST_PAIRS = 12  # comparisons whose seeds are drawn
NAME_CHARS = 80


def forest(study: Study) -> dict[str, Any] | None:
    """Differences with their intervals and those of single seeds, the largest at the top; an open end is null."""
    known = [each for each in study.comparisons if each.difference is not None and each.interval is not None]
    if not known:
        return None
    known.sort(key=lambda each: each.difference or 0.0)
    scale = 100.0 if study.metric.is_rate else 1.0
    several = len({each.baseline for each in known}) > 1
    names = [f"{each.condition} − {each.baseline}" if several else each.condition for each in known]
    return {
        "kind": "forest",
        "unit": _axis(study.metric),
        "labels": [plain(name, NAME_CHARS) for name in names],
        "values": [scale * (each.difference or 0.0) for each in known],
        "low": [_end(each.interval[0], scale) for each in known if each.interval],
        "high": [_end(each.interval[1], scale) for each in known if each.interval],
        "seeds": [[scale * (right - left) for _, left, right in _sides(each)] for each in known],
        "verdicts": [KINDS[each.verdict] for each in known],
    }


def seed_plots(study: Study, first_number: int) -> tuple[str, list[dict[str, Any]]]:
    """A small figure per comparison: each seed as a line from the baseline to the condition."""
    order = {verdict: place for place, verdict in enumerate(KINDS)}
    chosen = sorted((each for each in study.comparisons if each.per_seed), key=lambda each: order[each.verdict])
    chosen = chosen[:MOST_PAIRS]
    scale = 100.0 if study.metric.is_rate else 1.0
    figures = [_pair(each, study, scale) for each in chosen]
    ends = [value for figure in figures for line in figure["lines"] for value in line["y"]]
    parts = []
    for number, (each, figure) in enumerate(zip(chosen, figures, strict=True), start=first_number):
        room = 0.06 * ((max(ends) - min(ends)) or 1.0)
        figure["range"] = [min(ends) - room, max(ends) + room]
        rising = sum(line["y"][1] > line["y"][0] for line in figure["lines"])
        note = f"higher in {rising} of {len(each.seeds)} seeds"
        title = f"{each.condition} against {each.baseline}"
        parts.append(plot(number, title, note, _numbers(each, study, title), kind="pair", level=4))
    grid = f'<div class="pairs">{"".join(parts)}</div>' if parts else ""
    return grid, figures


def profile(view: SetsView) -> dict[str, Any]:
    """The performance profiles: the share of seeds and sets whose result is above each threshold."""
    is_rate = all(metric.is_rate for metric in view.metrics)
    return {
        "kind": "plugin",
        "x": list(view.thresholds),
        "lines": [{"name": plain(each.condition, NAME_CHARS), "y": list(each.profile)} for each in view.conditions],
        "thin": [],
        "points": [],
        "labels": [],
        "x_title": "rate" if is_rate else plain(view.metrics[0], 40),
        "y_title": "share of seeds and sets above it",
        "x_mark": None,
        "y_mark": 0.5,
        "log": False,
        "share": True,
        "is_line": True,
    }


def _pair(comparison: Comparison, study: Study, scale: float) -> dict[str, Any]:
    return {
        "kind": "pair",
        "share": study.metric.is_rate,
        "lines": [{"seed": seed, "y": [scale * left, scale * right]} for seed, left, right in _sides(comparison)],
        "verdict": KINDS[comparison.verdict],
    }


def _numbers(comparison: Comparison, study: Study, title: str) -> str:
    rows = [
        (text(seed), text(shown(left, study.metric)), text(shown(right, study.metric)))
        for seed, left, right in _sides(comparison)
    ]
    return table(title, ("seed", comparison.baseline, comparison.condition), rows, is_caption_shown=False)


def _sides(comparison: Comparison) -> list[tuple[int, float, float]]:
    """Seed, value of the baseline, value of the condition."""
    found = comparison.per_seed
    return list(zip(comparison.seeds, found.baseline, found.condition, strict=True)) if found else []


def _end(limit: float, scale: float) -> float | None:
    return scale * limit if math.isfinite(limit) else None


def _axis(metric: Metric) -> str:
    return "difference in percentage points" if metric.is_rate else f"difference in {plain(metric, 40)}"
