"""What a percentage point of held-out gain cost, with an interval that knows when there was no gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.example_rates import NoExamplesError, aligned, per_example, read_rates
from retrain.records.runs.metric import HELD_OUT
from retrain.verdicts.stats.paired import t_interval

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The held-out rate after the last evaluation less that of the first, in percentage points, with its interval.

    `values_C` are the gains whose mean it is: of a run's clusters of examples, or of a condition's runs. Without an
    interval there is too little to tell.
    """

    points: float
    interval: tuple[float, float] | None
    values_C: tuple[float, ...]
    first: int
    last: int


def gain_of(run: Path, held_out: Mapping[int, float]) -> Gain | str:
    """The gain of a run between its first and its last evaluation, over its examples; or why there is none."""
    if len(held_out) < 2:
        return "evaluated once" if held_out else "no held-out evaluation"
    first, last = min(held_out), max(held_out)
    figure = per_example(HELD_OUT)
    try:
        before, after = (read_rates(run, figure, step=step, expected=held_out[step]) for step in (first, last))
        rates_2E = aligned([("the first evaluation", before), ("the last one", after)])
    except NoExamplesError:
        points = 100.0 * (held_out[last] - held_out[first])
        return Gain(points=points, interval=None, values_C=(points,), first=first, last=last)
    _, cluster_E = np.unique(before.clusters, return_inverse=True)
    sums_C, sizes_C = np.bincount(cluster_E, weights=rates_2E[1] - rates_2E[0]), np.bincount(cluster_E)
    values_C = 100.0 * sums_C / sizes_C.mean()  # their mean is that of all examples, whatever the clusters' sizes
    return _gain(values_C, first, last)


def mean_gain(gains: list[Gain]) -> Gain:
    """The mean gain of runs; its interval is over seeds, for these held-out examples."""
    return _gain(np.array([gain.points for gain in gains]), gains[0].first, max(gain.last for gain in gains))


def _gain(values_C: Floats, first: int, last: int) -> Gain:
    mean, is_spread = float(values_C.mean()), float(np.ptp(values_C)) > 1e-9  # equal values say nothing about the error
    interval = t_interval(values_C) if is_spread else None
    return Gain(points=mean, interval=interval, values_C=tuple(values_C.tolist()), first=first, last=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPerPoint:
    """Cost over gain. Where the gain may be none there is no `interval`, but what a point costs `at_least`.

    `at_least` is the cost over the upper limit of the gain; None where that is no gain either, or not known.
    """

    value: float | None
    interval: tuple[float, float] | None
    at_least: float | None


def cost_per_point(costs: Floats, gain: Gain) -> CostPerPoint:
    """Mean of `costs`, one for each of `gain.values_C` or a single one, over the mean gain, by Fieller's theorem.

    The limits are the roots c of (mean(x) - c mean(y))^2 = t^2 var(x - c y) / n with costs x and gains y (Fieller,
    JRSS B 16:175, 1954). The set is bounded, and an interval, just if Student's interval of the gain is without 0.
    """
    points = np.array(gain.values_C)
    x = np.broadcast_to(costs, points.shape) if costs.size == 1 else costs
    value = float(x.mean()) / gain.points if gain.points > 0 else None
    if gain.interval is None:
        return CostPerPoint(value=value, interval=None, at_least=None)
    low, high = gain.interval
    if low <= 0.0:
        return CostPerPoint(value=value, interval=None, at_least=float(x.mean()) / high if high > 0.0 else None)
    n, mean_x, mean_y = points.size, float(x.mean()), gain.points
    squared = ((high - low) / 2) ** 2  # t^2 var(y) / n
    t2_n = squared / float(points.var(ddof=1)) if squared else 0.0
    var_x = float(x.var(ddof=1)) if n > 1 else 0.0
    cov = float(np.cov(x, points)[0, 1]) if n > 1 else 0.0
    a, b, c = mean_y**2 - squared, mean_x * mean_y - t2_n * cov, mean_x**2 - t2_n * var_x
    root = math.sqrt(max(0.0, b * b - a * c))
    return CostPerPoint(value=value, interval=((b - root) / a, (b + root) / a), at_least=None)
