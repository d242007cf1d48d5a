"""Finds the finished runs that a forecast may learn from: of the same model, data, evaluation and number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Floats
from retrain.records.reading import table_of
from retrain.records.record_names import METRICS
from retrain.records.run import Run, SettingsKey, is_run, settings_key
from retrain.records.runs.metric import HELD_OUT
from retrain.records.runs.run_status import DONE, status_of_run
from retrain.records.runs.scan import scan

SAME_TABLES = ("data", "environment", "reward", "eval")
SAME_KEYS = (("model", "model"), ("training", "max_steps"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The held-out rates of a run, by the number of finished steps; 0 is before training."""

    folder: Path
    record: Mapping[str, Any]
    state: str
    steps: tuple[int, ...]
    rates_K: Floats

    @property
    def max_steps(self) -> int:
        return int(table_of(self.record, "config", "training").get("max_steps", 0))

    @property
    def is_done(self) -> bool:
        """True if it has ended as planned, with an evaluation after its last step."""
        return self.state == DONE and bool(self.steps) and self.steps[-1] == self.max_steps

    @property
    def condition(self) -> SettingsKey:
        return settings_key(self.record)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """N finished runs at the evaluations that the forecast run has had, and their last rates.

    `others` counts the finished runs of another task, or evaluated after other steps.
    """

    curves_NK: Floats
    finals_N: Floats
    conditions: tuple[SettingsKey, ...]
    others: int


def read_curve(run: Path) -> Curve:
    """Return the held-out rates of a run so far; ConfigError when the folder is no run, or damaged."""
    if not is_run(run):
        what = "is not a run (run.json)" if run.is_dir() else "no such folder"
        raise ConfigError(Problem(where=str(run), what=what, fix="`retrain status` lists runs"))
    record = Run(run).manifest
    curves = Run(run).curves({HELD_OUT.field}) if Run(run).has(METRICS) else None
    rates_R = curves.column(HELD_OUT.field) if curves else np.zeros(0)
    is_rate_R = np.isfinite(rates_R)
    steps = tuple(int(step) + 1 for step in curves.steps_R[is_rate_R]) if curves else ()
    return Curve(folder=run, record=record, state=status_of_run(run).state, steps=steps, rates_K=rates_R[is_rate_R])


def find_past(run: Curve, among: Path) -> Past:
    """Return every usable finished run below `among` but the run itself; unreadable ones are skipped."""
    overview = scan(among)
    statuses = [*overview.runs, *(each.status for one in overview.campaigns for each in one.runs if each.status)]
    done = dict.fromkeys(status.path for status in statuses if status.state == DONE)
    folders = [folder for folder in done if folder.resolve() != run.folder.resolve()]
    used: list[Curve] = []
    for folder in folders:
        with suppress(ConfigError):
            each = read_curve(folder)
            is_same = each.is_done and task_of(each.record) == task_of(run.record)
            used += [each] if is_same and each.steps[: len(run.steps)] == run.steps else []
    return Past(
        curves_NK=np.array([each.rates_K[: len(run.steps)] for each in used]).reshape(len(used), len(run.steps)),
        finals_N=np.array([float(each.rates_K[-1]) for each in used]),
        conditions=tuple(each.condition for each in used),
        others=len(folders) - len(used),
    )


def task_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that two runs must share: model, data, reward, evaluation, number of steps."""
    keys = tuple(table_of(record, "config", table).get(key) for table, key in SAME_KEYS)
    return (*keys, *(table_of(record, "config", table) for table in SAME_TABLES))
