"""Forecasts of a run's last value from its first ones, with intervals that hold whatever the law (conformal).

Shapes: N finished runs, K values of a curve, C conditions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.kernel.types import Floats

# On features of size 1 or less, rates: it matters only where runs are few or their curves alike.
RIDGE = 1e-2
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected last value, and an interval that holds in at least about `level` of new conditions."""

    point: float
    low: float
    high: float
    level: float


def needed_conditions(level: float) -> int:
    """Return the fewest conditions with a finite interval of this level: level / (1 - level), rounded up."""
    return math.ceil(level / (1.0 - level) - _ROUNDING)


def forecast(
    curves_NK: Floats, finals_N: Floats, conditions: Sequence[Hashable], curve_K: Floats, *, level: float = 0.8
) -> Forecast:
    """Forecast the last value of a run of a new condition from its first K values and runs of other conditions.

    A ridge regression of (last value of the run - mean of the newest third of its first K) on that mean, the rise since
    the oldest third, and the difference of the ends. Its absolute errors, each of a run of the condition that the fit
    left out, are the scores; one of n runs of a condition weighs 1 / ((C + 1) n), infinity 1 / (C + 1), and the `level`
    quantile of that law is the half-width: hierarchical conformal prediction (Lee, Barber, Willett 2023,
    arXiv:2306.06342; Dunn, Wasserman, Ramdas 2022) with errors across folds (Barber et al. 2021, CV+). It covers at
    about `level` if conditions are exchangeable, too wide rather than too narrow for another seed of a condition seen.
    The limits are not cut to a range; below `needed_conditions` they are infinite. ValueError when a value is not
    finite, or there are fewer than two conditions.
    """
    if not all(np.isfinite(each).all() for each in (curves_NK, finals_N, curve_K)) or not curve_K.size:
        raise ValueError("every value must be a finite number, and a run have at least one")
    labels = list(dict.fromkeys(conditions))
    if len(labels) < 2:
        raise ValueError("a fit without a condition needs another one")
    features_NF = np.stack([_features(each) for each in curves_NK])
    changes_N = finals_N - features_NF[:, 1]
    numbers_N = np.array([labels.index(each) for each in conditions])
    scores_N, weights_N = np.empty(len(finals_N)), np.empty(len(finals_N))
    for number in range(len(labels)):
        out_N = numbers_N == number
        fit_F = _fitted(features_NF[~out_N], changes_N[~out_N])
        scores_N[out_N] = np.abs(changes_N[out_N] - features_NF[out_N] @ fit_F)
        weights_N[out_N] = 1.0 / ((len(labels) + 1) * out_N.sum())
    features_F = _features(curve_K)
    point = float(features_F[1] + features_F @ _fitted(features_NF, changes_N))
    # The mass of the new run itself lies at infinity: its own error may be beyond all others.
    masses_N, scores_N = np.append(weights_N, 1.0 / (len(labels) + 1)), np.append(scores_N, math.inf)
    reach = float(np.quantile(scores_N, level - _ROUNDING, weights=masses_N, method="inverted_cdf"))
    return Forecast(point=point, low=point - reach, high=point + reach, level=level)


def left_out(
    curves_NK: Floats, finals_N: Floats, conditions: Sequence[Hashable], *, level: float = 0.8
) -> list[Forecast]:
    """Return the forecast of each run from the runs of all other conditions."""
    found = []
    for curve_K, condition in zip(curves_NK, conditions, strict=True):
        is_other_N = [each != condition for each in conditions]
        kept = [each for each in conditions if each != condition]
        found.append(forecast(curves_NK[is_other_N], finals_N[is_other_N], kept, curve_K, level=level))
    return found


def _features(curve_K: Floats) -> Floats:
    """Return 1, the mean of the newest third, its rise over the oldest third, and the difference of the ends."""
    third = max(1, len(curve_K) // 3)
    newest, oldest = curve_K[-third:].mean(), curve_K[:third].mean()
    return np.array([1.0, newest, newest - oldest, curve_K[-1] - curve_K[0]])


def _fitted(features_NF: Floats, targets_N: Floats) -> Floats:
    """Fit a ridge regression that leaves the intercept free."""
    penalty = RIDGE * np.eye(features_NF.shape[1])
    penalty[0, 0] = 0.0
    return np.linalg.solve(features_NF.T @ features_NF + penalty, features_NF.T @ targets_N).astype(np.float64)
