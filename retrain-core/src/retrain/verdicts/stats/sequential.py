"""Planned looks: the group-sequential sign-flip test, whose chance of a false verdict over all looks is at most alpha.

`diffs_N` are paired differences in the order planned. `counts_K` says how many of them each look so far has seen, and
`shares_K` how far along the plan it was taken (seeds planned for that look over seeds planned in all).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats.flip import at_most
from retrain.verdicts.stats.inversion import Interval, inverted

EXACT_SEEDS = 14  # 8,192 patterns, the first sign being free; plans with more seeds draw theirs
DRAWN = 9_999
ALPHA_STEPS = 24  # bisections of the p value: to 6e-8
_STREAMS = Seeds(0)  # fixed, so that a look is a pure function of the differences


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
    return math.erfc(z / math.sqrt(2.0 * share))  # 2 - 2 Phi(x) = erfc(x / sqrt 2)


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
        if self.n_max > EXACT_SEEDS:  # among all patterns the observed one is there already
            sums_KP = np.concatenate([sums_KP, observed_K[:, None]], axis=1)
        return _Sums(observed_K=observed_K, sums_KP=sums_KP, slack=1e-12 * float(sizes_N.sum()))

    def _first_rejection(self, sums: _Sums, alpha: float) -> int | None:
        total = sums.sums_KP.shape[1]
        is_alive_P = np.ones(total, dtype=bool)
        for look, share in enumerate(self.shares_K):
            alive_A = sums.sums_KP[look, is_alive_P]
            left = math.floor(spent(alpha, share, self.spend) * total + 1e-9) - (total - alive_A.size)
            if left <= 0:
                continue
            kept = alive_A.size - left  # the largest sum that is kept sets the cut, so that ties share their fate
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


FUTURES = 200
DRAWN_OF_A_FUTURE = 999
LEAST_SEEDS = 3  # fewer say nothing about the spread


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
