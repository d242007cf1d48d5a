"""Aligns curves on a common budget of steps, tokens or seconds, and summarises each as one number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.curves import SECONDS, TOKENS, Curves
from retrain.records.runs.metric import Direction, Metric, Summary

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
