"""Campaigns with a design, drawn: a factorial factor by factor, and conditions over their learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from retrain.report.parts import Heading, Part, Plot, Table, Tiles, note, plain
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison import Values
from retrain.verdicts.study.factorial import level_text, mixed
from retrain.verdicts.study.sensitivity import rate_by_rate_sentence, sensitivity_sentence
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.sentences import with_interval

NAME_CHARS = 80
Line = Sequence[tuple[Any, Values]]  # x, and the value of each seed there


def by_factor(study: Study, factors: Mapping[str, Mapping[str, Any]]) -> list[Part]:
    """Return a plot for each pair of factors, averaged over the others; empty unless a factorial was compared."""
    if not any(each.effect for each in study.comparisons):
        return []
    texts = {name: {label: level_text(level) for label, level in each.items()} for name, each in factors.items()}

    def values(levels: Mapping[str, str]) -> Values:
        cells = next(iter(texts.values()))
        labels = [label for label in cells if all(texts[name][label] == level for name, level in levels.items())]
        return mixed(dict.fromkeys(labels, 1.0 / len(labels)), study.values)

    plots = []
    for one, two in combinations(texts, 2):
        lefts, rights = (list(dict.fromkeys(texts[name].values())) for name in (one, two))
        lines = {f"{one}={left}": [(right, values({one: left, two: right})) for right in rights] for left in lefts}
        plots.append(_plot(f"{one} by {two}", lines, study, two, {"type": "category"}))
    legend = "Means over seeds with their 95 % intervals. Lines that are not parallel show an interaction."
    return [Heading("Factor by factor"), note(legend), Tiles("plots", plots)] if plots else []


def by_rate(study: Study) -> list[Part]:
    """Return the curves over learning rates, and the width of each; empty without such conditions."""
    if not study.sensitivity:
        return []
    rates = sorted({rate for each in study.sensitivity for rate in each.labels})
    lines = {each.label: [(x, study.values[name]) for x, name in each.labels.items()] for each in study.sensitivity}
    widths = [sensitivity_sentence(each, study.metric) for each in study.sensitivity]
    widths += [rate_by_rate_sentence(each, study.metric) for each in study.rate_by_rate]
    axis = {"type": "log", "tickvals": rates, "ticktext": [f"{rate:.3g}" for rate in rates]}
    plot = _plot("Result by learning rate", lines, study, "lr", axis)
    return [Heading("Sensitivity to the learning rate"), *(note(f"{each}.") for each in widths), Tiles("plots", [plot])]


def _plot(title: str, lines: Mapping[str, Line], study: Study, x_title: str, axis: Mapping[str, Any]) -> Plot:
    """Return lines of means over seeds with their 95 % intervals, and the same numbers as a table."""
    metric, traces, rows = study.metric, [], []
    scale = 100.0 if metric.is_rate else 1.0
    for place, (name, line) in enumerate(lines.items()):
        known = [(x, np.array(list(each.values()))) for x, each in line if each]
        means, spans = [float(values_N.mean()) for _, values_N in known], [t_interval(each_N) for _, each_N in known]
        half = [scale * (span[1] - span[0]) / 2 if span else 0.0 for span in spans]
        colour = f"c{place % 7 + 1}"
        drawn: dict[str, Any] = {"type": "scatter", "mode": "lines+markers", "name": plain(name, NAME_CHARS)}
        drawn |= {"x": [x if isinstance(x, float) else plain(x, NAME_CHARS) for x, _ in known]}
        drawn |= {"y": [scale * mean for mean in means], "line": {"color": colour, "width": 2.4}}
        drawn |= {"error_y": {"type": "data", "array": half, "color": colour, "thickness": 1.2}}
        traces.append(drawn)
        rows += [
            (name, str(x), with_interval(mean, span, metric), str(values_N.size))
            for (x, values_N), mean, span in zip(known, means, spans, strict=True)
        ]
    font = {"size": 11.5}
    layout = {
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "xaxis": {
            **axis,
            "automargin": False,
            "title": {"text": plain(x_title, NAME_CHARS), "standoff": 4, "font": font},
        },
        "yaxis": {"title": {"text": f"{plain(metric, 40)}{', %' if metric.is_rate else ''}", "font": font}},
    }
    table = Table(title, ("line", x_title, "mean [95 % interval]", "seeds"), rows, is_caption_shown=False)
    return Plot(title, "", {"kind": "traces", "traces": traces, "layout": layout}, table, kind="tall")
