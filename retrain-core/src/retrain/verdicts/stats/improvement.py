"""The chance that one condition ends above another: over seeds in pairs, and over all pairs of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from retrain.kernel.types import Floats
from retrain.verdicts.stats.binomial import binomial_limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """P(condition > baseline), ties counted half, with its interval; all in [0, 1]."""

    probability: float
    interval: tuple[float, float]


def improvement_in_pairs(diffs_N: Floats, *, level: float = 0.95) -> Improvement | None:
    """The share of seeds with a positive difference, with exact binomial limits; None without seeds.

    Clopper & Pearson's (1934), which cover with at least `level`. A tie is a loss in the lower limit and a win in the
    upper one, so that they stay on the safe side.
    """
    num_seeds = diffs_N.size
    if not num_seeds:
        return None
    wins, ties = int(np.sum(diffs_N > 0)), int(np.sum(diffs_N == 0))
    low, _ = binomial_limits(wins, num_seeds, level=level)
    _, high = binomial_limits(wins + ties, num_seeds, level=level)
    return Improvement(probability=(wins + ties / 2) / num_seeds, interval=(low, high))


def improvement_of_all_pairs(baseline_N: Floats, condition_M: Floats, *, level: float = 0.95) -> Improvement | None:
    """P(X > Y) + P(X = Y) / 2 of a run X of the condition and a run Y of the baseline; None without runs.

    The Mann-Whitney statistic over the number of pairs, as rliable's `probability_of_improvement` (arXiv:2108.13264).
    We differ in the interval: its bootstrap says [1, 1] whenever all runs of one side are above all of the other. This
    one is Newcombe's fifth (Statistics in Medicine 25:559, 2006): all probabilities t whose distance from the estimate
    is at most z times the standard deviation that Hanley and McNeil give for t, the sizes in it replaced by their mean.
    It takes both sides as independent, which same seeds are not: positive correlation makes it too wide.
    """
    if not baseline_N.size or not condition_M.size:
        return None
    found = probability_of_improvement(baseline_N, condition_M)
    return Improvement(probability=found, interval=_newcombe(found, baseline_N.size, condition_M.size, level=level))


def probability_of_improvement(baseline_N: Floats, condition_M: Floats) -> float:
    """P(X > Y) + P(X = Y) / 2 over all pairs of values."""
    signs_MN = np.sign(condition_M[:, None] - baseline_N[None, :])
    return float(0.5 + signs_MN.mean() / 2)


def _newcombe(found: float, num_baseline: int, num_condition: int, *, level: float) -> tuple[float, float]:
    from scipy.optimize import brentq
    from scipy.stats import norm

    z, size = float(norm.ppf(0.5 + level / 2)), (num_baseline + num_condition) / 2

    def outside(t: float) -> float:
        spread = 1.0 + (size - 1.0) * ((1.0 - t) / (2.0 - t) + t / (1.0 + t))
        return abs(found - t) - z * math.sqrt(t * (1.0 - t) * spread / (num_baseline * num_condition))

    # At 0 and 1 the spread is zero, as is the distance of such an estimate: the limit sought is the other root.
    low = float(brentq(outside, 0.0, min(found, 1.0 - 1e-9))) if found > 1e-9 else 0.0
    high = float(brentq(outside, max(found, 1e-9), 1.0)) if found < 1.0 - 1e-9 else 1.0
    return low, high
