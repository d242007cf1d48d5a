"""Tests of paired differences that allow for several looks, and the intervals that agree with them.

Planned looks: the group-sequential sign-flip test, whose chance of a false verdict over all looks is at most alpha. At
any time: an e-process, valid without a plan however often one looks.

`diffs_N` are paired differences in the order planned or of arrival. `counts_K` says how many of them each look so far
has seen, and `shares_K` how far along the plan it was taken (seeds planned for that look over seeds planned in all).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats.flip import at_most

# The first sign is free, so 8,192 patterns are counted; larger plans draw patterns.
EXACT_SEEDS = 14
DRAWN = 9_999
# Bisections of the p value, to 6e-8.
ALPHA_STEPS = 24
# Fixed, so that a look is a pure function of the differences.
_STREAMS = Seeds(0)


def spent(alpha: float, share: float, spend: Spend) -> float:
    """Return the alpha that may be spent by the time that `share` of the planned seeds are in (Lan & DeMets 1983).

    pocock: alpha ln(1 + (e - 1) t); obrien_fleming: 2 - 2 Phi(z_(alpha / 2) / sqrt t). Both are alpha at t = 1, and
    grow with alpha at every t, as Holm's correction over several conditions needs (Maurer & Bretz 2013).
    """
    if share >= 1.0:
        return alpha
    if spend is Spend.POCOCK:
        return alpha * math.log1p((math.e - 1.0) * share)
    z = -NormalDist().inv_cdf(alpha / 2.0)
    # 2 - 2 Phi(x) = erfc(x / sqrt 2). erfc keeps its precision in the tail, where 1 - Phi loses all digits.
    return math.erfc(z / math.sqrt(2.0 * share))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequentialFlip:
    """The test after the looks that were taken; nothing in it depends on looks still to come.

    Given the sizes of the differences their signs are fair coins if the conditions do not differ, across looks too. At
    each look, of the sign patterns not rejected before, those with the largest |sum| are rejected, as many as the alpha
    spent by then allows; ties are rejected together or not at all, and unspent alpha carries over. Exact for symmetric
    differences: patterns are enumerated for plans of up to 14 seeds and drawn, the observed one among them, for larger
    ones. A look's patterns do not depend on later looks, so a decision is never taken back.

    `n_max` are the seeds of the plan. The p value is an alpha at which the test rejects by now, found by bisection:
    patterns make steps, so that a smaller one may reject too. Differs from the published procedure only in that it
    conditions on the sizes of the differences instead of assuming normal ones.
    """

    diffs_N: Floats
    counts_K: Sequence[int]
    shares_K: Sequence[float]
    n_max: int
    spend: Spend
    drawn: int = DRAWN
    _signs_NP: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        counts_K = list(self.counts_K)
        if len(counts_K) != len(self.shares_K) or counts_K != sorted(counts_K) or self._seen > self.diffs_N.size:
            raise ValueError(f"looks at {counts_K} of {self.diffs_N.size} differences, {len(self.shares_K)} shares")
        if not np.isfinite(self.diffs_N).all():
            raise ValueError("a difference is not finite")
        signs_NP = _patterns(self.n_max, self.drawn) if self.n_max > EXACT_SEEDS else _every_pattern(self._seen)
        object.__setattr__(self, "_signs_NP", signs_NP[: self._seen])

    @property
    def _seen(self) -> int:
        return self.counts_K[-1] if self.counts_K else 0

    def rejected_at(self, alpha: float, shift: float = 0.0) -> int | None:
        """Return the index of the first look that rejects a mean difference of `shift` at `alpha`; None if none has."""
        return self._first_rejection(self._sums(shift), alpha)

    @property
    def p(self) -> float:
        """An alpha at which the test rejects 'no difference' by now, by bisection; 1 before the first look."""
        return self._smallest_alpha(self._sums(0.0))

    @property
    def smallest_p(self) -> float:
        """The best p after these looks: if all non-zero differences had one sign."""
        sizes_N = np.abs(self.diffs_N[: self._seen])
        return self._smallest_alpha(self._sums_of(sizes_N, np.ones_like(sizes_N)))

    def interval(self, level: float) -> Interval:
        """Return the differences that no look has rejected at 1 - level (repeated interval, Jennison & Turnbull 1989).

        Covers the true one at all looks together with probability `level`; leaves out zero exactly where p <= 1 -
        level. A limit is infinite where no difference however large could have been rejected.
        """
        alpha = 1.0 - level
        return inverted(
            self.diffs_N,
            is_rejected=lambda shift: self.rejected_at(alpha, shift) is not None,
            is_zero_rejected=at_most(self.p, alpha),
        )

    def _sums(self, shift: float) -> _Sums:
        shifted_N = self.diffs_N[: self._seen] - shift
        return self._sums_of(np.abs(shifted_N), np.where(shifted_N < 0, -1.0, 1.0))

    def _sums_of(self, sizes_N: Floats, observed_N: Floats) -> _Sums:
        sizes_KN = np.where(np.arange(self._seen) < np.array(self.counts_K)[:, None], sizes_N, 0.0)
        observed_K = np.abs(sizes_KN @ observed_N)
        sums_KP = np.abs(sizes_KN @ self._signs_NP)
        # Drawn patterns lack the observed one; among all patterns it is counted already.
        if self.n_max > EXACT_SEEDS:
            sums_KP = np.concatenate([sums_KP, observed_K[:, None]], axis=1)
        return _Sums(observed_K=observed_K, sums_KP=sums_KP, slack=1e-12 * float(sizes_N.sum()))

    def _first_rejection(self, sums: _Sums, alpha: float) -> int | None:
        total = sums.sums_KP.shape[1]
        is_alive_P = np.ones(total, dtype=bool)
        for look, share in enumerate(self.shares_K):
            alive_A = sums.sums_KP[look, is_alive_P]
            # 1e-9: a whole number of patterns that came out a little low by rounding is still whole.
            left = math.floor(spent(alpha, share, self.spend) * total + 1e-9) - (total - alive_A.size)
            if left <= 0:
                continue
            # The largest sum that is kept sets the cut, so that ties are treated alike.
            kept = alive_A.size - left
            cut = float(np.partition(alive_A, kept - 1)[kept - 1]) + sums.slack if kept > 0 else -1.0
            if sums.observed_K[look] > cut:
                return look
            is_alive_P[is_alive_P] = alive_A <= cut
        return None

    def _smallest_alpha(self, sums: _Sums) -> float:
        if not self.counts_K or self._first_rejection(sums, 1.0) is None:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(ALPHA_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._first_rejection(sums, middle) is not None else (middle, high)
        return high


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    """|sum| at every look: of the observed signs, and of all patterns; sums closer than `slack` are ties."""

    observed_K: Floats
    sums_KP: Floats
    slack: float


@cache
def _every_pattern(size: int) -> Floats:
    """Return every pattern of signs whose first is +, (n, 2^(n - 1)); their negatives have the same |sum|."""
    bits_NP = (np.arange(2 ** max(0, size - 1)) >> np.maximum(np.arange(size) - 1, 0)[:, None]) & 1
    bits_NP[:1] = 0
    return np.asarray(1.0 - 2.0 * bits_NP, dtype=np.float64)


@cache
def _patterns(n_max: int, drawn: int) -> Floats:
    """Return drawn patterns of signs, (n_max, drawn): the first rows are the same however many are used."""
    stream = _STREAMS.stream("compare", "planned looks", n_max, drawn)
    return np.asarray(stream.integers(0, 2, (n_max, drawn)) * 2.0 - 1.0, dtype=np.float64)


# Good to 3.5 percentage points; a campaign stops for futility below 5 %.
FUTURES = 200
DRAWN_OF_A_FUTURE = 999
# Fewer do not estimate the spread.
LEAST_SEEDS = 3


def conditional_powers(
    diffs_N: Floats, *, counts_K: Sequence[int], looks: Sequence[int], spend: Spend, alpha: float
) -> tuple[float, float] | None:
    """Return shares of 200 futures in which the test rejects at `alpha` by its last look, below and above zero.

    Futures are normal with the mean and the standard deviation seen so far ("current trend"), one difference for every
    seed still to come; `counts_K` are the differences at each look taken. None below three differences or without any
    spread: there is no trend to continue. The futures are the same at every call. Stopping for futility cannot raise
    the chance of a false verdict, so nothing is corrected for it; it costs some power where the trend is unlucky.
    """
    seen = counts_K[-1] if counts_K else 0
    if seen < LEAST_SEEDS or np.ptp(diffs_N[:seen]) == 0.0:
        return None
    n_max, taken = looks[-1], looks[len(counts_K) - 1]
    mean, sd = float(diffs_N[:seen].mean()), float(diffs_N[:seen].std(ddof=1))
    coming_FN = mean + sd * _STREAMS.stream("compare", "futures", n_max).standard_normal((FUTURES, n_max - taken))
    later_K = [seen + look - taken for look in looks[len(counts_K) :]]
    rejected = [0, 0]
    for coming_N in coming_FN:
        test = SequentialFlip(
            diffs_N=np.concatenate([diffs_N[:seen], coming_N]),
            counts_K=[*counts_K, *later_K],
            shares_K=[look / n_max for look in looks],
            n_max=n_max,
            spend=spend,
            drawn=DRAWN_OF_A_FUTURE,
        )
        rejected[int(test.diffs_N.sum() > 0.0)] += test.rejected_at(alpha) is not None
    return rejected[0] / FUTURES, rejected[1] / FUTURES


Interval = tuple[float, float]
# Bisections per limit, to 1e-9 of the range searched.
STEPS = 30
# In ranges of the data: so far away every difference has one sign.
FAR = 1e6


def inverted(diffs_N: Floats, *, is_rejected: Callable[[float], bool], is_zero_rejected: bool) -> Interval:
    """Return the interval around the mean of the shifts that a test of 'the mean is `shift`' does not reject.

    It always holds the mean difference, and zero exactly unless `is_zero_rejected`: interval and verdict agree. Limits
    are infinite where even a shift far outside the data is not rejected. If the shifts that are not rejected have
    gaps, a limit is one of their edges; without a difference it is the whole line.
    """
    if not diffs_N.size:
        return -math.inf, math.inf
    mean = float(diffs_N.mean())
    far = FAR * max(float(np.ptp(diffs_N)), float(np.abs(diffs_N).max()), np.finfo(float).tiny)
    inner = [mean] if is_zero_rejected else [mean, 0.0]
    # A rejected zero bounds the interval on its side of the mean.
    low, high = (0.0 if is_zero_rejected and (end < 0.0) == (mean > 0.0) else None for end in (-far, far))
    return _limit(min(inner), -far, low, is_rejected), _limit(max(inner), far, high, is_rejected)


def _limit(inside: float, far: float, outside: float | None, is_rejected: Callable[[float], bool]) -> float:
    """Return the edge between `inside`, not rejected, and the first rejected shift towards `far`."""
    if outside is None:
        if not is_rejected(far):
            return math.copysign(math.inf, far)
        step = (far - inside) / FAR  # each four times the one before
        while abs(inside + step) < abs(far) and not is_rejected(inside + step):
            step *= 4.0
        outside = inside + step if abs(inside + step) < abs(far) else far
    for _ in range(STEPS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if is_rejected(middle) else (middle, outside)
    return inside


# In units of the spread so far: the small ones gain on weak effects over many seeds, the large ones on clear effects.
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
    # Squares of tiny differences would underflow.
    unitless_N = diffs_N / peak if peak > 0.0 else diffs_N
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
