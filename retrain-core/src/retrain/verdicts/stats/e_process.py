"""An anytime-valid test of paired differences: look after every seed, add seeds or stop at will, without a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from retrain.kernel.types import Floats
from retrain.verdicts.stats.flip import at_most
from retrain.verdicts.stats.inversion import Interval, inverted

BETS_B: Floats = np.array([0.4, 0.8, 1.6, 3.2, -0.4, -0.8, -1.6, -3.2])
MOST_SEEDS = 200


def running_evidence(diffs_N: Floats) -> Floats:
    """Return (M_1 .. M_n), the evidence against 'no difference' after each difference, in order of arrival.

    M_n is the mean over bets b of prod_i 2 / (1 + exp(-2 b x_i)), with x_i = d_i / s_i and s_i^2 the mean of d_1^2 ..
    d_i^2. Given the past and |d_i| the sign of d_i is a fair coin if the conditions do not differ, and each factor,
    e^(b x) / cosh(b x), has mean 1 over it: M is a nonnegative martingale, and the chance that it ever reaches 1 /
    alpha is at most alpha (Ville; de la Pena 1999; Ramdas, Ruf, Larsson & Koolen 2020, arXiv:2009.03167). A difference
    of zero leaves it unchanged.
    """
    if not np.isfinite(diffs_N).all():
        raise ValueError("a difference is not finite")
    peak = float(np.abs(diffs_N).max(initial=0.0))
    unitless_N = diffs_N / peak if peak > 0.0 else diffs_N  # squares of tiny differences would vanish
    rms_N = np.sqrt(np.cumsum(unitless_N**2) / np.arange(1, diffs_N.size + 1))
    x_N = np.divide(unitless_N, rms_N, out=np.zeros_like(unitless_N), where=rms_N > 0)
    log_BN = np.cumsum(math.log(2.0) - np.logaddexp(0.0, -2.0 * BETS_B[:, None] * x_N), axis=1)
    return np.asarray(np.exp(log_BN).mean(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnytimeTest:
    """The test after every difference so far, in order of arrival."""

    diffs_N: Floats

    @property
    def p(self) -> float:
        """1 / the largest evidence so far, at most 1: valid whenever and however often one looks."""
        return _p(self.diffs_N)

    @property
    def smallest_p(self) -> float:
        """The best p with as many non-zero differences: if each dwarfed those before it."""
        return _least_p(tuple((np.flatnonzero(self.diffs_N) + 1).tolist()))

    def interval(self, level: float) -> Interval:
        """Return the mean differences against which the evidence never reached 1 / (1 - level): a confidence sequence.

        Covers the true one at all times together with probability `level`; leaves out zero exactly where p <= 1 -
        level. A limit is infinite with too few seeds: fewer than seven at 95 %.
        """
        alpha = 1.0 - level
        return inverted(
            self.diffs_N,
            is_rejected=lambda shift: _p(self.diffs_N - shift) <= alpha,
            is_zero_rejected=at_most(self.p, alpha),
        )


def fewest_equal(alpha: float) -> int:
    """Return the fewest equal differences with which the test rejects at `alpha`: seven at 0.05."""
    return next((seeds for seeds in range(1, MOST_SEEDS) if _p(np.ones(seeds)) <= alpha), MOST_SEEDS)


@cache
def _least_p(places: tuple[int, ...]) -> float:
    """Return the least p if the differences that are not zero lie at these places, from 1.

    M_n is largest at x_i = sqrt(i): |x_i| is at most that, where all before it are as good as zero. Both sides of a bet
    sum to prod (1 + t_i) + prod (1 - t_i), t_i = tanh(b x_i), in which only products of an even number of t_i remain:
    largest where every t_i is.
    """
    roots_N = np.sqrt(np.array(places, dtype=float))
    evidence = np.exp((math.log(2.0) - np.logaddexp(0.0, -2.0 * BETS_B[:, None] * roots_N)).sum(axis=1)).mean()
    return float(min(1.0, 1.0 / evidence))


def _p(diffs_N: Floats) -> float:
    return float(min(1.0, 1.0 / max(1.0, float(running_evidence(diffs_N).max(initial=1.0)))))
