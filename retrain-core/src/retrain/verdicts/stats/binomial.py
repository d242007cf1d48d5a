"""Limits of shares: exact binomial ones, over several seeds, and of the chance that one condition ends above another.

Student's interval is one point where every seed has 100 %, and leaves [0, 1] near the edge. Exact limits need a number
of independent trials: examples. Completions of one example, and seeds on the same examples, are not
independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from retrain.kernel.types import Floats
from retrain.verdicts.stats.paired import t_interval

# A share times its trials that is this close to a whole number is one: 0.1 * 3 * 10 is 3.0000000000000004.
_WHOLE = 1e-9


def binomial_limits(right: float, total: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return exact limits of the chance behind `right` of `total` independent trials (Clopper & Pearson 1934).

    They cover with at least `level` and never leave [0, 1]. A trial may be partly right, as an example with several
    samples is: `right` is then rounded down for the lower and up for the upper limit, so they can only widen.
    ValueError without trials or when `right` is not within [0, `total`].
    """
    if total < 1 or not 0.0 <= right <= total:
        raise ValueError(f"{right} of {total} trials")
    # The quantile of the beta distribution, without the second that importing scipy.stats takes.
    from scipy.special import betaincinv

    least, most = math.floor(right + _WHOLE), math.ceil(right - _WHOLE)
    tail = (1.0 - level) / 2
    low = float(betaincinv(least, total - least + 1, tail)) if least else 0.0
    high = float(betaincinv(most + 1, total - most, 1.0 - tail)) if most < total else 1.0
    return low, high


def held_out_limits(rates_N: Floats, examples: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return limits of a condition's share for another seed on other examples; `rates_N` has a share per seed.

    All seeds answer the same `examples`, so the pooled data are that many trials, not as many for each seed. With m the
    mean share, the distance of each limit from m is sqrt(s^2 + b^2): s the distance of Student's t limit over seeds, b
    of the exact binomial limit of m x `examples` right (the method of variance estimates recovery, Zou & Donner
    2008). With one seed they are the binomial limits. ValueError without a seed or example.
    """
    mean = float(rates_N.mean()) if rates_N.size else math.nan
    exact = binomial_limits(mean * examples, examples, level=level)
    over_seeds = t_interval(rates_N, level=level) or (mean, mean)
    low, high = (math.hypot(mean - one, mean - other) for one, other in zip(exact, over_seeds, strict=True))
    return max(0.0, mean - low), min(1.0, mean + high)


def training_limits(rates_N: Floats, prompts: int, *, level: float = 0.95) -> tuple[float, float] | None:
    """Return limits of a share of training, where every seed has its own prompts; None below two seeds.

    Student's t over seeds holds their luck already; its limits are cut at 0 and 1. If all seeds have one share it
    has no spread to go by: then the exact limits of `prompts` independent ones per seed.
    """
    over_seeds = t_interval(rates_N, level=level)
    if over_seeds and np.ptp(rates_N) <= _WHOLE:
        trials = prompts * rates_N.size
        return binomial_limits(float(rates_N[0]) * trials, trials, level=level)
    return over_seeds and (max(0.0, over_seeds[0]), min(1.0, over_seeds[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """P(condition > baseline), ties counted half, with its interval; all in [0, 1]."""

    probability: float
    interval: tuple[float, float]


def improvement_in_pairs(diffs_N: Floats, *, level: float = 0.95) -> Improvement:
    """Return the share of seeds with a positive difference, with exact binomial limits; ValueError without seeds.

    A tie is a loss in the lower limit and a win in the upper one, so that they stay on the safe side.
    """
    num_seeds = diffs_N.size
    wins, ties = int(np.sum(diffs_N > 0)), int(np.sum(diffs_N == 0))
    low, _ = binomial_limits(wins, num_seeds, level=level)
    _, high = binomial_limits(wins + ties, num_seeds, level=level)
    return Improvement(probability=(wins + ties / 2) / num_seeds, interval=(low, high))


def improvement_of_all_pairs(baseline_N: Floats, condition_M: Floats, *, level: float = 0.95) -> Improvement:
    """Return P(X > Y) + P(X = Y) / 2 of a run X of the condition and a run Y of the baseline, of each at least one.

    The Mann-Whitney statistic over the number of pairs, as rliable's `probability_of_improvement` (arXiv:2108.13264),
    whose bootstrap interval is [1, 1] whenever all runs of one side are above all of the other. This one is Newcombe's
    fifth (Statistics in Medicine 25:559, 2006): all probabilities t whose distance from the estimate is at most z times
    the standard deviation that Hanley and McNeil give for t, the sizes in it replaced by their mean. It takes both
    sides as independent; where same seeds are positively correlated it is too wide.
    """
    found = probability_of_improvement(baseline_N, condition_M)
    from scipy.optimize import brentq
    from scipy.stats import norm

    z, size = float(norm.ppf(0.5 + level / 2)), (baseline_N.size + condition_M.size) / 2

    def outside(t: float) -> float:
        spread = 1.0 + (size - 1.0) * ((1.0 - t) / (2.0 - t) + t / (1.0 + t))
        return abs(found - t) - z * math.sqrt(t * (1.0 - t) * spread / (baseline_N.size * condition_M.size))

    # At 0 and 1 the spread is zero, as is the distance of such an estimate: the limit sought is the other root.
    low = float(brentq(outside, 0.0, min(found, 1.0 - 1e-9))) if found > 1e-9 else 0.0
    high = float(brentq(outside, max(found, 1e-9), 1.0)) if found < 1.0 - 1e-9 else 1.0
    return Improvement(probability=found, interval=(low, high))


def probability_of_improvement(baseline_N: Floats, condition_M: Floats) -> float:
    """Return P(X > Y) + P(X = Y) / 2 over all pairs of values."""
    signs_MN = np.sign(condition_M[:, None] - baseline_N[None, :])
    return float(0.5 + signs_MN.mean() / 2)
