"""The charts of the page: curves of many runs on a common grid of steps, as means with their intervals."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.curves import HELD_OUT, HELD_OUT_REWARD
from retrain.report import chart_specs
from retrain.report.gather import Material, ReportRun, RunLines, evaluated_steps
from retrain.report.parts import Heading, Part, Plot, Section, Table, Tiles, note

# Student's interval of two seeds reaches 12.7 standard errors to either side, and would dwarf the curve.
FEWEST_SEEDS = 3
# The last of the 16-bit codes means a missing number, so 65,534 steps remain.
MISSING = 65535
MOST_POINTS, FEWEST_POINTS = 240, 60
# Limit for all curves together: 2.4 MB on the page.
MOST_NUMBERS = 900_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConditionCurve:
    """The curves of a condition and of its runs; `is_interval`: the band is the interval of one run's evaluations."""

    band: Band
    is_interval: bool
    seeds: Sequence[tuple[ReportRun, Floats]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """A chart; if all runs have one value at all steps, that is `constant`, and nothing is drawn."""

    group: str
    spec: chart_specs.ChartSpec
    title: str
    x_P: Floats
    curves: Mapping[str, ConditionCurve]
    constant: float | None


def curve_section(material: Material) -> Section:
    """Return every chart with data, by group; only the value of a chart without change."""
    charts = build_charts(material)
    if not charts:
        return Section("curves", "Curves", [note("No run has written a step yet.")])
    indices = {label: index for index, label in enumerate(material.drawable)}
    parts: list[Part] = [note(line) for line in reading_notes(material, charts)]
    for group in dict.fromkeys(chart.group for chart in charts):
        members = [chart for chart in charts if chart.group == group]
        plots = [
            Plot(chart.title, chart.spec.note, _figure(chart, indices, charts), _numbers(chart), level=4)
            for chart in members
            if chart.constant is None
        ]
        same = [
            f"{each.title} {chart_specs.value_text(each.constant, each.spec.unit)}"
            for each in members
            if each.constant is not None
        ]
        parts.append(Heading(group))
        parts += [Tiles("plots", plots)] if plots else []
        parts += [note(f"The same in all runs at all steps: {'; '.join(same)}.")] if same else []
    return Section("curves", "Curves", parts)


def build_charts(material: Material) -> list[Chart]:
    """Return every chart with data; single seeds only for the conditions that are shown at first."""
    # A condition is three curves (mean and both limits), and each seed shown at first is one more.
    num_curves = 3 * len(material.drawable) + sum(len(material.of(label)) for label in material.shown)
    num_charts = sum(map(len, chart_specs.CHARTS.values()))
    most_points = min(MOST_POINTS, max(FEWEST_POINTS, MOST_NUMBERS // max(1, num_charts * num_curves)))
    num_steps = max((run.lines.num_steps for run in material.runs), default=0)
    grid = grid_for(num_steps, most_points, stride=material.stride)
    num_supervised = max((run.num_supervised for run in material.runs), default=0)
    warm_up_grid = grid_for(num_supervised, most_points, stride=material.stride)
    eval_steps = _eval_steps(material.runs, most_points)
    charts = []
    names = {name for run in material.runs for name in run.lines.values}
    added = [*chart_specs.set_charts(names), *chart_specs.task_charts(names), *chart_specs.part_charts(names)]
    is_graded = any(_is_graded(run.lines) for run in material.runs)
    pools = any((np.nan_to_num(run.lines.column("sepa_lambda")) != 0.0).any() for run in material.runs)
    for group, specs in chart_specs.CHARTS.items():
        for spec in (*specs, *(added if group == chart_specs.LEARNING else ())):
            field, title = _field(spec, material.runs)
            if field is None or (spec.is_eval and not eval_steps.size):
                continue
            if (spec.is_graded and not is_graded) or (spec.is_pooling and not pools):
                continue
            dense = warm_up_grid if spec.is_warm_up else grid
            curve = partial(_eval_curve, eval_steps) if spec.is_eval else partial(_dense_curve, dense, spec.is_warm_up)
            if curves := _conditions(material, field, curve, is_share=spec.unit is chart_specs.Unit.SHARE):
                x_P = eval_steps + 1 if spec.is_eval else dense.x_P
                chart = Chart(group=group, spec=spec, title=title, x_P=x_P, curves=curves, constant=_constant(curves))
                charts.append(chart)
    return charts


def values_of(lines: RunLines, field: str) -> Floats:
    """Return a run's column, or the ratio that a chart shows instead of a count."""
    values_R = lines.column(field)
    if field not in chart_specs.RATIOS:
        return values_R
    total_R = np.sum([np.nan_to_num(lines.column(each)) for each in chart_specs.RATIOS[field]], axis=0)
    ratios_R: Floats = np.divide(values_R, total_R, out=np.full(values_R.size, math.nan), where=total_R > 0)
    return ratios_R


Curve = Callable[[RunLines, str], Floats]  # of a run and a field


def _dense_curve(grid: Grid, is_warm_up: bool, lines: RunLines, field: str) -> Floats:
    first = lines.steps_R[0] if is_warm_up else 0
    return grid.binned(lines.steps_R - first, values_of(lines, field))


def _eval_curve(steps_P: Floats, lines: RunLines, field: str) -> Floats:
    values_R, found_P = lines.column(field), np.full(steps_P.size, math.nan)
    indices_R = np.searchsorted(steps_P, lines.steps_R)
    is_on_R = (indices_R < steps_P.size) & (steps_P[np.minimum(indices_R, steps_P.size - 1)] == lines.steps_R)
    found_P[indices_R[is_on_R]] = values_R[is_on_R]
    return found_P


def _conditions(material: Material, field: str, curve: Curve, *, is_share: bool) -> dict[str, ConditionCurve]:
    curves = {}
    for label in material.drawable:
        is_shown, drawn = label in material.shown, material.drawn(label)
        runs = [run for run in (material.of(label) if is_shown else drawn) if run.lines.steps_R.size]
        by_run = {id(run): curve(run.lines, field) for run in runs}
        band = band_of([by_run[id(run)] for run in drawn], is_share=is_share)
        if band is None:
            continue
        is_interval = field == HELD_OUT.field and len(drawn) == 1
        if is_interval:
            low_P, high_P = (curve(drawn[0].lines, end) for end in (chart_specs.LOW, chart_specs.HIGH))
            band = replace(band, low_P=low_P, high_P=high_P)
        seeds = [(run, y_P) for run in runs if is_shown and np.isfinite(y_P := by_run[id(run)]).any()]
        curves[label] = ConditionCurve(band=band, is_interval=is_interval, seeds=seeds)
    return curves


def _constant(curves: Mapping[str, ConditionCurve]) -> float | None:
    ends = [(np.nanmin(each.band.low_P), np.nanmax(each.band.high_P)) for each in curves.values()]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    # Means of equal numbers differ by rounding.
    is_flat = high - low <= 1e-12 * max(1.0, abs(high))
    spreads = (np.nanmax(y_P) - np.nanmin(y_P) > 1e-12 for each in curves.values() for _, y_P in each.seeds)
    return float(low) if is_flat and not any(spreads) else None


def _is_graded(lines: RunLines) -> bool:
    """True if the mean or a quantile shows some reward that is neither 0 nor 1."""
    quantiles = np.concatenate([lines.column(field) for field in chart_specs.REWARD_QUANTILES])
    rewards_R, rates_R = lines.column(HELD_OUT_REWARD.field), lines.column(HELD_OUT.field)
    is_between = np.isfinite(quantiles) & (quantiles != 0.0) & (quantiles != 1.0)
    return bool(is_between.any() or (np.abs(rewards_R - rates_R) > 1e-9).any())


def _field(spec: chart_specs.ChartSpec, runs: Sequence[ReportRun]) -> tuple[str | None, str]:
    """Return the field and title of a chart; for pass@k with the largest k above 1."""
    if spec.fields != (chart_specs.PASS_PREFIX,):
        found = (field for field in spec.fields if any(field in run.lines.values for run in runs))
        return next(found, None), spec.title
    names = {name for run in runs for name in run.lines.values if name.startswith(chart_specs.PASS_PREFIX)}
    sizes = [
        int(size) for name in names if (size := name.removeprefix(chart_specs.PASS_PREFIX)).isdigit() and len(size) < 6
    ]
    # pass@1 is the correct rate and has its own chart.
    if max(sizes, default=1) < 2:
        return None, spec.title
    return f"{chart_specs.PASS_PREFIX}{max(sizes)}", f"Held-out pass@{max(sizes)}"


def _eval_steps(runs: Sequence[ReportRun], most: int) -> Floats:
    steps = sorted({step for run in runs for step in evaluated_steps(run)})
    if len(steps) > most:
        steps = [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]
    return np.array(steps, dtype=np.float64)


def reading_notes(material: Material, charts: Sequence[Chart]) -> list[str]:
    """Return sentences about the aggregation of the curves, and about omitted steps and conditions."""
    lines = []
    if any(curve.band.num_seeds > 1 for chart in charts for curve in chart.curves.values()):
        lines.append(
            "Lines are means over the seeds of a condition, shades are the 95 % intervals of these means at each point "
            "(of two seeds: from one to the other), thin lines are single seeds (hidden at first when there are many). "
            "Means are over finished runs, or over all runs of a condition without any; thin dotted lines are "
            "unfinished runs."
        )
    elif any(curve.is_interval for chart in charts for curve in chart.curves.values()):
        lines.append("One run per condition: shades around held-out rates are their 95 % intervals over examples.")
    dense = next((chart for chart in charts if not chart.spec.is_eval and chart.x_P.size > 1), None)
    width = round(float(dense.x_P[1] - dense.x_P[0])) if dense else 1
    if material.stride > 1:
        lines.append(f"Downsampled: one training step in {material.stride} was read, and every evaluation.")
    if width > material.stride:
        steps = f"the steps read among {width}" if material.stride > 1 else f"{width} consecutive steps"
        lines.append(f"Downsampled: each point is the mean over {steps}.")
    if len(material.shown) < len(material.source.conditions):
        lines.append(
            f"{len(material.shown)} of {len(material.source.conditions)} conditions are drawn at first: the baseline, "
            "the best and the worst ones. Choose others below; only the first ones have single seeds."
        )
    if len(material.drawable) < len(material.source.conditions):
        lines.append(
            f"Only {len(material.drawable)} conditions have curves here; `retrain report RUN...` draws others."
        )
    return lines


def _figure(chart: Chart, indices: Mapping[str, int], charts: Sequence[Chart]) -> dict[str, Any]:
    return {
        "kind": "curves",
        "unit": chart.spec.unit.value,
        "x_title": "supervised steps" if chart.spec.is_warm_up else "steps",
        "markers": chart.spec.is_eval,
        "range": _range(chart, charts),
        "x": [round(float(x), 1) for x in chart.x_P],
        "curves": {str(indices[label]): _curve(curve) for label, curve in chart.curves.items()},
    }


def _range(chart: Chart, charts: Sequence[Chart]) -> list[float] | None:
    """Return the vertical axis that a chart shares with others; None for a separate one."""
    if not chart.spec.scale:
        return None
    curves = [curve for each in charts if each.spec.scale == chart.spec.scale for curve in each.curves.values()]
    low = min(float(np.nanmin(curve.band.low_P)) for curve in curves)
    high = max(float(np.nanmax(curve.band.high_P)) for curve in curves)
    # Otherwise the extreme curves lie on the frame of the chart.
    room = 0.05 * (high - low)
    return [low - room, high + room]


def _curve(curve: ConditionCurve) -> dict[str, Any]:
    content: dict[str, Any] = {"mean": packed(curve.band.mean_P), "n": curve.band.num_seeds}
    if curve.band.num_seeds > 1 or curve.is_interval:
        content |= {"low": packed(curve.band.low_P), "high": packed(curve.band.high_P)}
    if len(curve.seeds) > 1:
        content["seeds"] = [
            {"seed": run.candidate.seed, "done": run.is_done, "y": packed(y_P)} for run, y_P in curve.seeds
        ]
    return content


def _numbers(chart: Chart) -> Table:
    unit = chart.spec.unit
    rows = []
    for label, curve in chart.curves.items():
        mean_P = curve.band.mean_P[np.isfinite(curve.band.mean_P)]
        values = (mean_P[0], mean_P[-1], mean_P.min(), mean_P.max())
        ends = (ends_P[np.isfinite(ends_P)][-1:] for ends_P in (curve.band.low_P, curve.band.high_P))
        spread = " to ".join(chart_specs.value_text(float(end[0]) if end.size else None, unit) for end in ends)
        cells = [chart_specs.value_text(float(value), unit) for value in values]
        rows.append((label, *cells, spread if curve.band.num_seeds > 1 else "", str(curve.band.num_seeds)))
    heads = ("condition", "first", "last", "lowest", "highest", "last, interval", "seeds")
    return Table(chart.title, heads, rows, is_caption_shown=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Points of `width` consecutive steps each, at `x_P`; x counts finished steps, so 0 is before training."""

    num_points: int
    width: int

    @property
    def x_P(self) -> Floats:
        x_P: Floats = np.arange(self.num_points, dtype=np.float64) * self.width + (self.width + 1) / 2.0
        return x_P

    def binned(self, steps_R: Floats, values_R: Floats) -> Floats:
        """Return the mean of a run's rows within each point, NaN for a point without rows."""
        is_there_R = np.isfinite(values_R) & (steps_R >= 0)
        bins_R = (steps_R[is_there_R] // self.width).astype(np.int64)
        is_inside_R = bins_R < self.num_points
        bins_R, values_R = bins_R[is_inside_R], values_R[is_there_R][is_inside_R]
        sums_P = np.bincount(bins_R, weights=values_R, minlength=self.num_points)
        counts_P = np.bincount(bins_R, minlength=self.num_points)
        means_P: Floats = np.divide(sums_P, counts_P, out=np.full(self.num_points, math.nan), where=counts_P > 0)
        return means_P


def grid_for(num_steps: int, most_points: int, *, stride: int = 1) -> Grid:
    """Return the finest grid of at most `most_points` for `num_steps` steps of which one in `stride` was read.

    Every point covers the same number of steps that were read.
    """
    width = max(1, math.ceil(num_steps / max(1, most_points) / stride)) * stride
    return Grid(num_points=math.ceil(num_steps / width), width=width)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """Mean over seeds at each point with its 95 % interval; `num_seeds` of them have any number."""

    mean_P: Floats
    low_P: Floats
    high_P: Floats
    num_seeds: int


def band_of(curves_S: Sequence[Floats], *, is_share: bool = False) -> Band | None:
    """Return mean and Student's 95 % interval over seeds, point by point; None if no seed has a number.

    At points of two seeds, whose interval would dwarf the curve, it runs from one to the other. Shares stay in [0, 1].
    """
    curves_SP = np.array([curve for curve in curves_S if np.isfinite(curve).any()])
    if not curves_SP.size:
        return None
    is_there_SP = np.isfinite(curves_SP)
    counts_P = is_there_SP.sum(axis=0)
    sums_P = np.where(is_there_SP, curves_SP, 0.0).sum(axis=0)
    mean_P = np.divide(sums_P, counts_P, out=np.full(counts_P.size, math.nan), where=counts_P > 0)
    # Lowest and highest seed first: they stay the band of points with fewer seeds than an interval needs.
    low_P = np.where(is_there_SP, curves_SP, np.inf).min(axis=0)
    high_P = np.where(is_there_SP, curves_SP, -np.inf).max(axis=0)
    # Without this, points without a seed would keep the infinities of the line above.
    low_P[counts_P == 0] = high_P[counts_P == 0] = math.nan
    if (counts_P >= FEWEST_SEEDS).any():
        # Importing scipy.stats for the same quantile would take over a second.
        from scipy.special import stdtrit

        freedom_P = np.maximum(counts_P - 1, 1)
        squares_P = np.where(is_there_SP, (curves_SP - mean_P) ** 2, 0.0).sum(axis=0)
        half_P = stdtrit(freedom_P, 0.975) * np.sqrt(squares_P / freedom_P / np.maximum(counts_P, 1))
        low_P = np.where(counts_P >= FEWEST_SEEDS, mean_P - half_P, low_P)
        high_P = np.where(counts_P >= FEWEST_SEEDS, mean_P + half_P, high_P)
    if is_share:
        low_P, high_P = np.maximum(low_P, 0.0), np.minimum(high_P, 1.0)
    return Band(mean_P=mean_P, low_P=low_P, high_P=high_P, num_seeds=len(curves_SP))


def packed(values_P: Floats) -> dict[str, Any]:
    """Return numbers quantised to 16 bits between least and largest, as base64: a third of the size of text.

    The error is at most (largest - least) / 131,068, far below a pixel.
    """
    is_there_P = np.isfinite(values_P)
    if not is_there_P.any():
        return {"lo": 0.0, "hi": 0.0, "b": base64.b64encode(np.full(values_P.size, MISSING, "<u2").tobytes()).decode()}
    low, high = float(values_P[is_there_P].min()), float(values_P[is_there_P].max())
    shares_P = (values_P - low) / (high - low) if high > low else np.zeros(values_P.size)
    codes_P = np.where(is_there_P, np.rint(np.where(is_there_P, shares_P, 0.0) * (MISSING - 1)), MISSING).astype("<u2")
    return {"lo": low, "hi": high, "b": base64.b64encode(codes_P.tobytes()).decode()}
