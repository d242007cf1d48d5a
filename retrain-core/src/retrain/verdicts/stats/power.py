"""Power: the difference that a number of seeds can detect, and the seeds that a difference needs."""

from __future__ import annotations

import math
from functools import lru_cache

from retrain.verdicts.stats.flip import EXACT_SEEDS

POWER = 0.8
MOST_SEEDS = 10_000
_NEVER = 1e3  # standard deviations; upper end of the search


@lru_cache(maxsize=65536)
def power_of(num_seeds: int, d_z: float, alpha: float) -> float:
    """Return the chance of p <= alpha when the true mean difference is `d_z` standard deviations of the differences.

    That of the paired t-test (noncentral t), which the sign-flip test follows closely; with so few seeds that only the
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
    if num_seeds <= EXACT_SEEDS and math.floor(alpha * 2.0 ** (num_seeds - 1)) == 1:
        chance = min(chance, float(norm.cdf(d_z) ** num_seeds + norm.cdf(-d_z) ** num_seeds))
    return min(1.0, chance)


def least_seeds(alpha: float) -> int:
    """Return the fewest seeds with which the sign-flip test can reach p <= alpha: 2 / 2^n <= alpha."""
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


def seeds_needed(d_z: float, alpha: float) -> int | None:
    """Return the fewest seeds that find a true difference of `d_z` in 80 % of studies; None above 10,000."""
    d_z = abs(d_z)
    low, high = least_seeds(alpha) - 1, least_seeds(alpha)
    while power_of(high, d_z, alpha) < POWER:
        if high >= MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle, d_z, alpha) >= POWER else (middle, high)
    return high
