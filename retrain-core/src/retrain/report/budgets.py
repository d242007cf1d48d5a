"""How tokens and time were spent, by condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.report.chart_specs import GROUPS, TIMES, Unit, value_text
from retrain.report.gather import Material, ReportRun
from retrain.report.parts import Plot, Section, Table, note
from retrain.report.text import plain
from retrain.text.amounts import ABSENT

GROUP_NAMES = ("useful", "all right", "all wrong", "all same", "no verdict", "surplus")
TIME_NAMES = ("sampling", "scoring", "training", "other")
SHARES = (  # of a step, averaged over runs
    ("cut off at max_tokens", "max_token_hit_rate"),
    ("clipped", "clip_fraction"),
    ("masked by surprisal", "entropy_mask_fraction"),
)


def budget_section(material: Material) -> Section | None:
    """Share of the groups that carried gradient, and why the rest did not."""
    groups = _by_condition(material, _group_counts)
    if not groups:
        return None
    title = "Groups by training signal"
    figure = _bars(groups, GROUP_NAMES, "share of groups", material)
    rows = [(label, *(value_text(share, Unit.SHARE) for share in shares)) for label, shares in groups.items()]
    numbers = Table(title, ("condition", *GROUP_NAMES), rows, is_caption_shown=False)
    plot = Plot(title, "all steps that were read", figure, numbers, kind="bars")
    return Section("budget", "Signal budget", [note(_BUDGET), plot, _rates(material)])


_BUDGET = (
    "Only completions of groups whose rewards differ carry gradient. What is all right is solved, what is all wrong is "
    "too hard or never rewarded; both were sampled and paid for."
)


def time_section(material: Material) -> Section | None:
    """Seconds per step, by phase."""
    times = _by_condition(material, _phases)
    if not times:
        return None
    rows = []
    for label, values in times.items():
        total = sum(values)
        cells = [f"{value:.3g} s ({100 * value / total:.0f}%)" if total else ABSENT for value in values]
        evaluated = _mean(material.drawn(label), "eval_time_s")
        rows.append((label, *cells, f"{total:.3g} s", value_text(evaluated, Unit.SECONDS)))
    heads = ("condition", *TIME_NAMES, "step", "an evaluation")
    numbers = Table("Seconds per step", heads, rows, is_caption_shown=False)
    figure = _bars(times, TIME_NAMES, "seconds per step", material)
    remark = "mean over runs; evaluations come on top"
    return Section("time", "Time", [Plot("Seconds per step", remark, figure, numbers, kind="bars")])


def _by_condition(material: Material, counts: Any) -> dict[str, list[float]]:
    found = {}
    for label in material.drawable:
        values = [each for run in material.drawn(label) if (each := counts(run)) is not None]
        if values:
            found[label] = [float(value) for value in np.mean(values, axis=0)]
    return found


def _group_counts(run: ReportRun) -> list[float] | None:
    if "useful_groups" not in run.lines.values:
        return None
    counts = [run.lines.mean(field) or 0.0 for field in GROUPS]
    return [count / sum(counts) for count in counts] if sum(counts) else None


def _phases(run: ReportRun) -> list[float] | None:
    total = run.lines.mean("step_time_s")
    if total is None:
        return None
    phases = [run.lines.mean(field) or 0.0 for field in TIMES]
    return [*phases, max(0.0, total - sum(phases))]


def _rates(material: Material) -> Table:
    known = [(name, field) for name, field in SHARES if any(field in run.lines.values for run in material.runs)]
    rows = []
    for label in material.drawable:
        runs = material.drawn(label)
        sampled, trained = (_mean(runs, field) for field in ("sampled_tokens", "trained_tokens"))
        share = trained / sampled if sampled and trained is not None else None
        cells = [ABSENT if sampled is None else f"{sampled:,.0f}", value_text(share, Unit.SHARE)]
        cells += [value_text(_mean(runs, field), Unit.SHARE) for _, field in known]
        rows.append((label, *cells))
    heads = ("condition", "tokens per step", "trained", *(name for name, _ in known))
    return Table("Of the sampled tokens, mean over steps and runs", heads, rows)


def _mean(runs: Sequence[ReportRun], field: str) -> float | None:
    means = [mean for run in runs if (mean := run.lines.mean(field)) is not None]
    return sum(means) / len(means) if means else None


def _bars(values: Mapping[str, Sequence[float]], names: Sequence[str], unit: str, material: Material) -> dict[str, Any]:
    """Stacked bars, of the conditions that are shown at first; shares of their sum unless they are seconds."""
    shown = [label for label in values if label in material.shown]
    totals = {label: sum(values[label]) if unit.startswith("share") else 1.0 for label in shown}
    parts = {
        name: [values[label][index] / totals[label] if totals[label] else 0.0 for label in shown]
        for index, name in enumerate(names)
    }
    labels = [plain(label, 80) for label in shown]
    return {"kind": "bars", "unit": unit, "labels": labels, "parts": [{"name": n, "x": x} for n, x in parts.items()]}
