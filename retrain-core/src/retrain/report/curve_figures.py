"""The charts as sections of the page and as its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.types import Floats
from retrain.report.chart_specs import Unit, value_text
from retrain.report.charts import Chart, ConditionCurve
from retrain.report.gather import Material
from retrain.report.grid import packed
from retrain.report.markup import note, plot, section, table
from retrain.report.text import text


def curve_section(material: Material, charts: Sequence[Chart], first_number: int) -> tuple[str, list[dict[str, Any]]]:
    """The section and its figures, numbered from `first_number`."""
    if not charts:
        return section("curves", "Curves", note("No run has written a step yet.")), []
    indices = {label: index for index, label in enumerate(material.drawable)}
    parts = [note(line) for line in reading_notes(material, charts)]
    figures: list[dict[str, Any]] = []
    parts.append('<div id="legend" class="legend"></div>')
    for group in dict.fromkeys(chart.group for chart in charts):
        drawn = [chart for chart in charts if chart.group == group and chart.constant is None]
        flat = [chart for chart in charts if chart.group == group and chart.constant is not None]
        body = []
        for chart in drawn:
            number = first_number + len(figures)
            figures.append(_figure(chart, indices, _range(chart, charts)))
            body.append(plot(number, chart.title, chart.spec.note, _numbers(chart), level=4))
        same = ", ".join(f"{chart.title} {value_text(chart.constant, chart.spec.unit)}" for chart in flat)
        grid = f'<div class="plots">{"".join(body)}</div>' if body else ""
        parts.append(
            f"<h3>{text(group)}</h3>{grid}{note(f'The same in all runs at all steps: {same}.') if same else ''}"
        )
    return section("curves", "Curves", *parts), figures


def reading_notes(material: Material, charts: Sequence[Chart]) -> list[str]:
    """How the curves were aggregated, and what was left out."""
    lines = []
    if any(curve.band.num_seeds > 1 for chart in charts for curve in chart.curves.values()):
        lines.append(
            "Lines are means over the seeds of a condition, shades are the 95 % intervals of these means at each point "
            "(of two seeds: from one to the other), thin lines are single seeds (hidden at first when there are many). "
            "Means are of runs that are done, or of all when none of the condition is; thin dotted lines are runs that "
            "did not finish."
        )
    elif any(curve.is_interval for chart in charts for curve in chart.curves.values()):
        lines.append("One run per condition: shades around held-out rates are their 95 % intervals over examples.")
    width = _width(charts)
    if material.stride > 1:
        lines.append(f"Downsampled: of the training steps one in {material.stride} was read, and every evaluation.")
    if width > material.stride:
        which = f"the steps read among {width}" if material.stride > 1 else f"{width} consecutive steps"
        lines.append(f"Downsampled: each point is the mean over {which}.")
    if len(material.shown) < len(material.source.conditions):
        lines.append(
            f"{len(material.shown)} of {len(material.source.conditions)} conditions are drawn at first: the baseline, "
            "the best and the worst ones. Choose others below; single seeds are there for the first ones only."
        )
    if len(material.drawable) < len(material.source.conditions):
        lines.append(
            f"Only {len(material.drawable)} conditions have curves here; `retrain report RUN...` draws any others."
        )
    return lines


def _width(charts: Sequence[Chart]) -> int:
    dense = next((chart for chart in charts if not chart.spec.is_eval and chart.x_P.size > 1), None)
    return round(float(dense.x_P[1] - dense.x_P[0])) if dense else 1


def _figure(chart: Chart, indices: dict[str, int], range_: list[float] | None) -> dict[str, Any]:
    return {
        "kind": "curves",
        "unit": chart.spec.unit.value,
        "x_title": "supervised steps" if chart.spec.is_warm_up else "steps",
        "markers": chart.spec.is_eval,
        "range": range_,
        "x": [round(float(x), 1) for x in chart.x_P],
        "curves": {str(indices[label]): _curve(curve) for label, curve in chart.curves.items()},
    }


def _range(chart: Chart, charts: Sequence[Chart]) -> list[float] | None:
    """The vertical axis that a chart shares with others; None when it has its own."""
    if not chart.spec.scale:
        return None
    curves = [curve for each in charts if each.spec.scale == chart.spec.scale for curve in each.curves.values()]
    low = min(float(np.nanmin(curve.band.low_P)) for curve in curves)
    high = max(float(np.nanmax(curve.band.high_P)) for curve in curves)
    room = 0.05 * (high - low)
    return [low - room, high + room]


def _curve(curve: ConditionCurve) -> dict[str, Any]:
    has_band = curve.band.num_seeds > 1 or curve.is_interval
    content: dict[str, Any] = {"mean": packed(curve.band.mean_P), "n": curve.band.num_seeds}
    if has_band:
        content |= {"low": packed(curve.band.low_P), "high": packed(curve.band.high_P)}
    if len(curve.seeds) > 1:
        content["seeds"] = [{"seed": each.seed, "done": each.is_done, "y": packed(each.y_P)} for each in curve.seeds]
    return content


def _numbers(chart: Chart) -> str:
    """First, last, lowest and highest mean of each condition."""
    unit = chart.spec.unit
    rows = []
    for label, curve in chart.curves.items():
        mean_P = curve.band.mean_P[np.isfinite(curve.band.mean_P)]
        values = (mean_P[0], mean_P[-1], mean_P.min(), mean_P.max())
        spread = f"{_end(curve.band.low_P, unit)} to {_end(curve.band.high_P, unit)}"
        cells = [value_text(float(value), unit) for value in values]
        rows.append((text(label), *cells, spread if curve.band.num_seeds > 1 else "", str(curve.band.num_seeds)))
    heads = ("condition", "first", "last", "lowest", "highest", "last, interval", "seeds")
    return table(chart.title, heads, rows, is_caption_shown=False)


def _end(values_P: Floats, unit: Unit) -> str:
    known_P = values_P[np.isfinite(values_P)]
    return value_text(float(known_P[-1]) if known_P.size else None, unit)
