"""The curves of reward and shadow, side by side, as a section of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import ConfigError
from retrain.records.reading import Record, number
from retrain.records.run import Run
from retrain.tasks.scoring.shadow import shadow_name

MOST_POINTS = 200
PLOTS = (  # title, note, the reward's field and the shadow's
    ("Correct rate, training batches", "each step has other prompts", "correct_rate", "shadow_correct_rate"),
    ("Mean reward, training batches", "each step has other prompts", "mean_reward", "shadow_mean_reward"),
    ("Held-out correct rate", "on examples that are never trained on", "eval_correct_rate", "eval_shadow_rate"),
)


def report_section(run: RunView) -> Mapping[str, ReportSection] | None:
    """Both curves of a run with a shadow; None before its first line."""
    try:
        lines = [line for _, line in Run(run.folder).steps()]
    except ConfigError:
        return None
    plots = [plot for spec in PLOTS if (plot := _plot(lines, *spec)) is not None]
    if not plots:
        return None
    text = f"The shadow {shadow_name(run.config)!r} scored what was trained on the reward, and was not trained itself."
    return {"Reward and shadow": ReportSection(name="shadow", text=text, plots=plots)}


def _plot(lines: Sequence[Record], title: str, note: str, reward: str, shadow: str) -> ReportPlot | None:
    found = [(line["step"], number(line.get(reward)), number(line.get(shadow))) for line in lines if shadow in line]
    if not found:
        return None
    bins = np.array_split(np.arange(len(found)), min(MOST_POINTS, len(found)))
    points = [tuple(_mean([found[each][column] for each in part]) for column in range(3)) for part in bins]
    steps, rewards, shadows = zip(*points, strict=True)
    return ReportPlot(
        title=title,
        note=note if len(points) == len(found) else f"{note}; means of {len(bins[0])} steps",
        x=[0.0 if step is None else step + 1 for step in steps],
        lines={"reward": rewards, "shadow": shadows},
        x_title="step",
        is_share=shadow.endswith("_rate"),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
