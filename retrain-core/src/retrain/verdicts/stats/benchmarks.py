"""Runs on several benchmarks at once: aggregates, profiles and bootstrap intervals with the definitions of rliable.

R. Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264), and its
package rliable 1.2.0, with which the tests compare. `scores_NM` holds one score per run (N) and benchmark (M), higher
being better; each function takes any further axes in front, as the bootstrap needs.

rliable draws the runs of each benchmark separately. We draw whole runs: a good seed is often good on all benchmarks,
and drawing per benchmark covers less. Percentile intervals of few runs cover less than they say either way: they are
shown, and no verdict rests on them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from retrain.kernel.types import Floats
from retrain.verdicts.stats.binomial import probability_of_improvement

TRIM_FRAC = 0.25
RESAMPLES = 2_000
Statistic = Callable[[Floats], Floats]


def interquartile_mean(scores_NM: Floats) -> Floats:
    """Return the mean of the middle half of all scores, runs and benchmarks together: a quarter is cut at either end.

    The number cut is rounded down, as in `scipy.stats.trim_mean`.
    """
    flat = np.sort(scores_NM.reshape(*scores_NM.shape[:-2], -1), axis=-1)
    cut = int(TRIM_FRAC * flat.shape[-1])
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(axis=-1))


def optimality_gap(scores_NM: Floats, gamma: float = 1.0) -> Floats:
    """Return by how much scores fall short of `gamma` on average, those above counted as `gamma`."""
    return np.asarray(gamma - np.minimum(scores_NM, gamma).mean(axis=(-2, -1)))


def performance_profile(scores_NM: Floats, thresholds_T: Floats) -> Floats:
    """Return the share of runs and benchmarks above each threshold, (T,): rliable's score distribution."""
    shares = [(scores_NM > threshold).mean(axis=(-2, -1)) for threshold in thresholds_T.tolist()]
    return np.stack(shares, axis=-1)


def improvement_over_benchmarks(baseline_NM: Floats, condition_KM: Floats) -> float:
    """Return P(X > Y) + P(X = Y) / 2 of a run X of the condition and Y of the baseline, averaged over benchmarks."""
    pairs = zip(baseline_NM.T, condition_KM.T, strict=True)
    return float(np.mean([probability_of_improvement(left_N, right_K) for left_N, right_K in pairs]))


def bootstrap(
    scores_NM: Floats,
    statistic: Statistic,
    stream: Generator,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    is_stratified: bool = False,
) -> tuple[Floats, Floats]:
    """Return percentile limits of a statistic over runs drawn with replacement; with `is_stratified` per benchmark.

    ValueError unless there are two runs or more of finite scores on at least one benchmark.
    """
    num_runs, num_benchmarks = scores_NM.shape
    if num_runs < 2 or not num_benchmarks or not np.isfinite(scores_NM).all():
        raise ValueError(f"finite scores of two runs or more on one benchmark or more are needed, not {scores_NM!r}")
    columns = num_benchmarks if is_stratified else 1
    rows_RNM = stream.integers(num_runs, size=(resamples, num_runs, columns))
    drawn_RNM = scores_NM[rows_RNM, np.arange(num_benchmarks)]
    tail = (1.0 - level) / 2
    low, high = np.quantile(statistic(drawn_RNM), [tail, 1.0 - tail], axis=0)
    return np.asarray(low), np.asarray(high)
