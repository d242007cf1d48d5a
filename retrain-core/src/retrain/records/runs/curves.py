"""Curves of runs: the metric of a comparison, its fields of `metrics.jsonl` as arrays, their value within a budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from pydantic_core import from_json

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Floats
from retrain.records.reading import Record, damaged, number, parse_record, parsed_lines
from retrain.text.amounts import ABSENT, percent

EVAL_PREFIX = "eval_"
PASS_PREFIX = "eval_pass_at_"
PASS_MARK = "_pass_at_"  # of the held-out examples and of further sets


class Summary(StrEnum):
    """The summary of a curve as one number; see `retrain.records.runs.curves`."""

    FINAL = "final"
    BEST = "best"
    AUC = "auc"


class Direction(StrEnum):
    """The better side of a metric."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Metric:
    field: str
    summary: Summary = Summary.FINAL

    def __str__(self) -> str:
        return f"{self.field}:{self.summary}"

    @property
    def is_eval(self) -> bool:
        """True if it comes from the held-out evaluation; few steps have one."""
        return self.field.startswith(EVAL_PREFIX)

    @property
    def is_rate(self) -> bool:
        return self.field.endswith("_rate") or PASS_MARK in self.field


CORRECT = Metric("correct_rate")
HELD_OUT = Metric("eval_correct_rate")
HELD_OUT_REWARD = Metric("eval_mean_reward")


def parse_metric(text: str, *, where: str) -> Metric:
    """Parse `FIELD` or `FIELD:SUMMARY`; ConfigError names the summaries."""
    field, _, summary = text.partition(":")
    known = [each.value for each in Summary]
    if not field or (summary and summary not in known):
        what = f"{text!r} is not a metric"
        fix = f"FIELD or FIELD:SUMMARY, a field of metrics.jsonl and one of {', '.join(known)}"
        raise ConfigError(Problem(code="compare.bad-metric", where=where, what=what, fix=fix))
    return Metric(field, Summary(summary or Summary.FINAL))


def shown(value: float | None, metric: Metric) -> str:
    if value is None:
        return ABSENT
    return percent(value) if metric.is_rate else f"{value:.4g}"


def shown_difference(value: float | None, metric: Metric, *, signed: bool = True) -> str:
    """Return a difference of two values as text, of rates in percentage points (pp)."""
    if value is None:
        return ABSENT
    sign = "+" if signed else ""
    return f"{100 * value:{sign}.1f} pp" if metric.is_rate else f"{value:{sign}.4g}"


TOKENS, SECONDS = "sampled_tokens", "step_time_s"
EVAL_KEPT = frozenset({HELD_OUT.field, HELD_OUT_REWARD.field, "eval_examples", "eval_samples"})
# beyond anything that a run measures; the square of a larger value would overflow in a variance
LARGEST = 1e100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Rows of one run in order of steps, from step -1; `values` has an array per field, NaN where it is missing."""

    steps_R: Floats
    values: Mapping[str, Floats]

    @property
    def num_steps(self) -> int:
        return max(0, int(self.steps_R[-1]) + 1) if self.steps_R.size else 0

    def column(self, field: str) -> Floats:
        """Return the values of a field; all NaN if the run never has it."""
        found = self.values.get(field)
        return np.full(self.steps_R.size, math.nan) if found is None else found

    def has(self, field: str) -> bool:
        return field in self.values and bool(np.isfinite(self.values[field]).any())


def read_curves(file: Path, fields: Collection[str]) -> Curves:
    """Read `fields` and the held-out results of each line; NaN for null, text, beyond 1e100 or absent."""
    steps: list[float] = []
    columns: dict[str, dict[int, float]] = {}  # by field: row -> value
    for line_number, record in parsed_lines(file, _step_record):
        step = _number(record["step"])
        if steps and not step > steps[-1]:
            raise damaged(f"{file}:{line_number}", f"step {step:.0f} comes after step {steps[-1]:.0f}")
        evaluated = [name for name in record if name in EVAL_KEPT or name.startswith(PASS_PREFIX)]
        for name in (*evaluated, *fields):
            if math.isfinite(value := _number(record.get(name))):
                columns.setdefault(name, {})[len(steps)] = value
        steps.append(step)
    values = {name: np.full(len(steps), math.nan) for name in columns}
    for name, found in columns.items():
        values[name][list(found)] = list(found.values())
    return Curves(steps_R=np.array(steps), values=values)


def _step_record(line: bytes) -> Record:
    """Return the record of a line that has a step; a campaign has half a million lines, and `from_json` is fast."""
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError:
        value = None
    record: Record = value if isinstance(value, dict) else parse_record(line, allow_overflow=True)  # names the fault
    if not _number(record.get("step")).is_integer():
        raise ValueError("the line has no step")
    return record


def _number(value: object) -> float:
    found = number(value)
    return math.nan if found is None or abs(found) > LARGEST else float(found)


# The rate of one training step is of a few prompts; the mean over the last tenth is steadier and hardly older.
WINDOW_FRAC = 0.1


class Align(StrEnum):
    STEPS = "steps"
    TOKENS = "tokens"
    SECONDS = "seconds"


COSTS = {Align.TOKENS: TOKENS, Align.SECONDS: SECONDS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spent:
    """A run's curves with its cost after each row, in units of the axis; the row before training is at 0."""

    curves: Curves
    spent_R: Floats

    @property
    def total(self) -> float:
        return float(self.spent_R[-1]) if self.spent_R.size else 0.0


def along(curves: Curves, align: Align) -> Spent | None:
    """Return the curves over an axis; None if the run never recorded that cost.

    Steps count from 1 after the first. Tokens are all sampled tokens, seconds those in steps, without evaluations. A
    step without samples costs no tokens.
    """
    if align is Align.STEPS:
        return Spent(curves=curves, spent_R=curves.steps_R + 1.0)
    if not curves.has(COSTS[align]):
        return None
    # The evaluation before training has tokens and seconds, too, but they trained nothing.
    cost_R = np.where(curves.steps_R < 0, 0.0, np.nan_to_num(curves.column(COSTS[align]), nan=0.0))
    return Spent(curves=curves, spent_R=np.cumsum(cost_R))


def value_at(
    spent: Spent, metric: Metric, *, budget: float, last: int | None = None, direction: Direction = Direction.HIGHER
) -> float | None:
    """Return the metric of one run within a budget; None if the run has no number for it.

    final: mean over the last `last` steps within the budget (default: a tenth of them, at least one); of a held-out
    field its last value after training began. best: the highest (lowest) mean over as many consecutive recorded steps,
    of a held-out field its highest value: picked after the fact, so biased upwards in all conditions alike. auc:
    trapezoidal area under the recorded values divided by the budget that they span, the curve cut exactly at the
    budget by linear interpolation.
    """
    within_R = spent.spent_R <= budget
    values_R = spent.curves.column(metric.field)
    if metric.summary is Summary.AUC:
        return _mean_height(spent.spent_R, values_R, budget)
    trained_S = values_R[within_R & (spent.curves.steps_R >= 0)]
    recorded = trained_S[np.isfinite(trained_S)]
    window = max(1, round(trained_S.size * WINDOW_FRAC) if last is None else min(last, trained_S.size))
    if metric.is_eval:
        window = 1
    elif metric.summary is Summary.FINAL:  # of the last steps, those that have a number
        recorded = trained_S[-window:][np.isfinite(trained_S[-window:])]
    if not recorded.size:
        return None
    if metric.summary is Summary.FINAL:
        return float(recorded[-window:].mean())
    means = np.lib.stride_tricks.sliding_window_view(recorded, min(window, recorded.size)).mean(axis=1)
    return float(means.max() if direction is Direction.HIGHER else means.min())


def _mean_height(spent_R: Floats, values_R: Floats, budget: float) -> float | None:
    is_number_R = np.isfinite(values_R)
    x_N, y_N = spent_R[is_number_R], values_R[is_number_R]
    inside = int(np.searchsorted(x_N, budget, side="right"))
    if not inside:
        return None
    x, y = x_N[:inside], y_N[:inside]
    if inside < x_N.size and x[-1] < budget:
        x, y = np.append(x, budget), np.append(y, np.interp(budget, x_N, y_N))
    span = float(x[-1] - x[0])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1])) / (2.0 * span)) if span > 0.0 else float(y[-1])
