"""The report's sections on a shadow: the curves of both verifiers, and the alarms as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import ConfigError
from retrain.observe.gaming.alarm import read_alarms
from retrain.records.reading import Record, number
from retrain.records.run import Run
from retrain.tasks.scoring.build import shadow_keys

MOST_SHOWN = 5  # completions of an alarm
MOST_CHARS = 300


def alarm_text(run: Path) -> str:
    """Every alarm with its most credited completions; empty without one. A damaged file is reported."""
    try:
        return "\n\n".join("\n".join(_lines(alarm)) for alarm in read_alarms(run))
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        return f"gaming.jsonl cannot be read: {error}"


def _lines(alarm: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Step {alarm['step']}: since step {alarm['since']} the reward paid {alarm['num_completions']} completions "
        f"that its shadow does not confirm (evidence {alarm['evidence']:.3g}; the alarm begins at 20)."
    )
    if alarm["tokens"]:
        yield f"Their credit is on {' | '.join(repr(each['token']) for each in alarm['tokens'])}"
    for each in alarm["completions"][:MOST_SHOWN]:
        text = " ".join(str(each["completion"]).split())
        place = f"step {each['step']}, group {each['group']}, completion {each['index']}"
        yield f"{place}, reward {each['reward']:g}, shadow {each['shadow_reward']:g}: {text[:MOST_CHARS]}"
    yield "All of them are in gaming.jsonl."


MOST_POINTS = 200
PLOTS = (  # title, note, the reward's field and the shadow's
    ("Correct rate, training batches", "each step has other prompts", "correct_rate", "shadow_correct_rate"),
    ("Mean reward, training batches", "each step has other prompts", "mean_reward", "shadow_mean_reward"),
    ("Held-out correct rate", "on examples that are never trained on", "eval_correct_rate", "eval_shadow_rate"),
)


def report_section(run: RunView) -> Mapping[str, ReportSection] | None:
    """The curves of reward and shadow; None before the run's first line."""
    try:
        lines = [line for _, line in Run(run.folder).steps()]
    except ConfigError:
        return None
    plots = [plot for spec in PLOTS if (plot := _plot(lines, *spec)) is not None]
    if not plots:
        return None
    name = shadow_keys(run.config).shadow
    text = f"The shadow {name!r} scored what was trained on the reward, and was not trained itself."
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
