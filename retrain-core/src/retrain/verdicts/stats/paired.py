"""Two conditions over the same seeds: effect sizes, Student's interval, and power.

`diffs_N` are differences (condition minus baseline), one per seed that both have. Power is the difference that a number
of seeds can detect.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from retrain.kernel.types import Floats
from retrain.verdicts.stats.flip import EXACT_SEEDS


def t_interval(values_N: Floats, *, level: float = 0.95) -> tuple[float, float] | None:
    """Return Student's t interval of the mean over seeds; None below two seeds."""
    if values_N.size < 2:
        return None
    # what `t.ppf` is, in a third of the time that scipy.stats takes to import
    from scipy.special import stdtrit

    mean, half = float(values_N.mean()), float(values_N.std(ddof=1) / np.sqrt(values_N.size))
    half *= float(stdtrit(values_N.size - 1, 0.5 + level / 2))
    return mean - half, mean + half


def paired_d(diffs_N: Floats) -> float | None:
    """Return Cohen's d_z: mean difference over the standard deviation of the differences; None without spread."""
    sd = spread(diffs_N)
    return float(diffs_N.mean()) / sd if sd else None


def pooled_d(baseline_N: Floats, condition_N: Floats) -> float | None:
    """Return Cohen's d: mean difference over the root mean square of both standard deviations; None without spread."""
    if baseline_N.size < 2:
        return None
    sd = float(np.sqrt((baseline_N.var(ddof=1) + condition_N.var(ddof=1)) / 2))
    return float(condition_N.mean() - baseline_N.mean()) / sd if sd else None


def spread(diffs_N: Floats) -> float | None:
    """Return the standard deviation of the differences (n - 1); None below two seeds, 0 when they are all equal."""
    if diffs_N.size < 2:
        return None
    return 0.0 if np.ptp(diffs_N) == 0.0 else float(diffs_N.std(ddof=1))


POWER = 0.8
# In standard deviations: beyond this, the search for a detectable difference gives up.
_NEVER = 1e3


@lru_cache(maxsize=65536)
def power_of(num_seeds: int, d_z: float, alpha: float) -> float:
    """Return the chance of p <= alpha when the true mean difference is `d_z` standard deviations of the differences.

    From the paired t-test (noncentral t), close to the sign-flip test; with so few seeds that only the
    most extreme pattern is below alpha, the smaller exact chance for normal differences that all have one sign; 0 where
    no pattern is.
    """
    if num_seeds < least_seeds(alpha):
        return 0.0
    from scipy.stats import nct, norm, t

    critical, noncentrality = float(t.ppf(1 - alpha / 2, num_seeds - 1)), d_z * math.sqrt(num_seeds)
    above = float(nct.sf(critical, num_seeds - 1, noncentrality))
    below = float(nct.cdf(-critical, num_seeds - 1, noncentrality))
    # Far from zero scipy returns NaN: there one tail has probability 1 and the other 0.
    chance = 1.0 if math.isnan(above) else above + (0.0 if math.isnan(below) else below)
    # A single pattern pair below alpha: every difference must have the same sign.
    if num_seeds <= EXACT_SEEDS and math.floor(alpha * 2.0 ** (num_seeds - 1)) == 1:
        chance = min(chance, float(norm.cdf(d_z) ** num_seeds + norm.cdf(-d_z) ** num_seeds))
    return min(1.0, chance)


def least_seeds(alpha: float) -> int:
    """Return the fewest seeds with which the sign-flip test can reach p <= alpha: 2 / 2^n <= alpha."""
    # The slack keeps an alpha of 1 / 32, given as 0.03125, from asking for one seed more by rounding.
    return max(2, math.ceil(math.log2(2.0 / alpha) - 1e-9))


@lru_cache(maxsize=4096)
def spread_range(num_seeds: int, level: float = 0.95) -> tuple[float, float]:
    """Return factors on the standard deviation of n normal values that bound the true one (chi-square, n - 1).

    sd sqrt((n - 1) / q) with q the upper and the lower quantile. 0.66 and 2.04 for eight values; n >= 2.
    """
    from scipy.stats import chi2

    freedom, tail = num_seeds - 1, (1.0 - level) / 2.0
    low, high = (math.sqrt(freedom / float(chi2.ppf(share, freedom))) for share in (1.0 - tail, tail))
    return low, high


@lru_cache(maxsize=4096)
def detectable_d(num_seeds: int, alpha: float) -> float | None:
    """Return the smallest true d_z found in 80 % of studies; None when no difference could be."""
    if power_of(num_seeds, _NEVER, alpha) < POWER:
        return None
    from scipy.optimize import brentq

    return float(brentq(lambda d: power_of(num_seeds, d, alpha) - POWER, 0.0, 30.0, xtol=1e-6))
