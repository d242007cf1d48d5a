"""The sign-flip test of a mean difference and the interval that agrees with it, both from the same subsets of seeds.

`diffs_N` are differences (condition minus baseline), one per seed that both have. The only assumption is that
differences of independent runs are symmetric around their centre.

Turning the signs of the seeds in a subset A turns the mean into (S - 2 S_A) / N, with sums S of all and S_A of A: it is
at least as far from zero as S / N exactly where S_A, or the sum of the other seeds, lies on the far side of zero. So
the p value counts subset means beyond zero, and the limits are subset means counted off from either end (J. A.
Hartigan, "Using subsample values as typical values", JASA 64:1303, 1969): the interval leaves out zero exactly where p
<= 1 - level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, count
from typing import Self

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

# All 16,384 subsets of 14 seeds take milliseconds; of more seeds, subsets are drawn.
EXACT_SEEDS = 14
# Eighteen runs can be dealt to two sides of nine in 48,620 ways.
EXACT_EXCHANGES = 9
# The observed pattern is one of those that are drawn: without it p could be zero.
PATTERNS = 10_000
MOST_PATTERNS = 200_000
# Relative to the sum of all sizes: sums that are equal on paper differ by less.
ROUNDING = 1e-12
# Relative, because 1 - level is never exact: a count at its limit must not fall below it.
COUNT_SLACK = 1e-9
_CHUNK = 4096
# Fixed, so that a comparison is reproducible.
_SEEDS = Seeds(0)


@dataclass(frozen=True, slots=True, eq=False)
class FlipTest:
    """The means of subsets of the differences, in ascending order, from which p and every interval are read off.

    One pair of a subset and its complement per sign pattern of the two-sided test. The pair of no seed and all seeds is
    the observed pattern, as -inf and inf.
    """

    means_K: Floats
    smallest_p: float  # of differences of these sizes that all have one sign: 2 / 2^n with n that are not zero

    @classmethod
    def of(cls, diffs_N: Floats, *, patterns: int = PATTERNS) -> Self:
        """Use all 2^(N - 1) patterns of up to 14 seeds, otherwise the observed one and `patterns` - 1 drawn ones.

        ValueError without differences, or when one is not finite. Differences are taken in units of the largest and
        sums within rounding of zero as zero, so that neither units nor the order of adding decide.
        """
        if not diffs_N.size or not np.isfinite(diffs_N).all():
            raise ValueError(f"differences must be finite and at least one, not {diffs_N!r}")
        peak = float(np.abs(diffs_N).max()) or 1.0
        units_N = diffs_N / peak
        means_K = _subset_means(units_N, patterns)
        # Then no subset but the empty one is within rounding of zero.
        if (np.abs(units_N) > _rounding(units_N)).all():
            smallest = float(np.mean(np.isinf(means_K)))
        else:
            # A difference of zero ties whatever its sign, so equal signs are the best case.
            smallest = _p(_subset_means(np.abs(units_N), patterns))
        return cls(np.sort(means_K) * peak, smallest)

    @classmethod
    def of_exchanges(cls, baseline_N: Floats, condition_N: Floats, *, patterns: int = PATTERNS) -> Self:
        """Unpaired permutation test of as many runs on both sides: all C(2N, N) deals of up to nine, or drawn ones.

        Exchanging k runs of each side subtracts 2 k / N times the difference of their means from the mean difference,
        so means of exchanged runs take the role that means of subsets have above. No variance is estimated or pooled.
        It assumes that runs of both sides have one distribution if the conditions do not differ.
        """
        if baseline_N.shape != condition_N.shape or not baseline_N.size:
            raise ValueError(f"as many runs on both sides, at least one, not {baseline_N.size} and {condition_N.size}")
        both_M = np.concatenate([baseline_N, condition_N])
        if not np.isfinite(both_M).all():
            raise ValueError(f"values must be finite, not {both_M!r}")
        # Exchanges do not depend on the origin, and sums of centred values keep their digits.
        both_M = both_M - both_M.mean()
        peak = float(np.abs(both_M).max()) or 1.0
        left_N, right_N = np.split(both_M / peak, 2)
        is_exact = baseline_N.size <= EXACT_EXCHANGES
        exchanged_K = _all_exchanges(left_N, right_N) if is_exact else _drawn_exchanges(left_N, right_N, patterns)
        means_K = np.concatenate([[-np.inf, np.inf], exchanged_K])
        means_K[np.abs(means_K) <= _rounding(both_M / peak)] = 0.0
        return cls(np.sort(means_K) * peak, 2.0 / means_K.size)

    @property
    def p(self) -> float:
        """Two-sided p: the share of sign patterns, with the observed one, whose mean is at least as far from zero."""
        return _p(self.means_K)

    def interval(self, level: float) -> tuple[float, float]:
        """Return the k-th smallest and the k-th largest subset mean, k = (1 - level) patterns, rounded down.

        It covers the centre of symmetry with a chance of 1 - k / patterns, at least `level`, more where two subsets
        have one mean. Infinite where k is 0: so few seeds cannot bound the difference at this level, as they cannot
        reach p <= 1 - level.
        """
        # Half, since turning all signs gives the same p; the observed pattern is included.
        patterns = self.means_K.size // 2
        # Rounded down, so that coverage is never below the level.
        k = math.floor((1.0 - level) * patterns * (1.0 + COUNT_SLACK))
        return float(self.means_K[k]), float(self.means_K[-1 - k])


def fewest_exchanged(alpha: float) -> int:
    """Return the fewest seeds of each side with which the unpaired test can reach p <= alpha: 2 / C(2n, n) <= alpha."""
    return next(n for n in count(2) if at_most(2.0 / math.comb(2 * n, n), alpha))


def at_most(p: float, alpha: float) -> bool:
    """True if p <= alpha, with the slack that `FlipTest.interval` gives the level, so that rounding parts neither."""
    return p <= alpha * (1.0 + COUNT_SLACK)


def patterns_for(comparisons: int, alpha: float) -> int:
    """Return enough drawn sign patterns that the Holm correction over so many comparisons leaves room below alpha."""
    return int(min(MOST_PATTERNS, max(PATTERNS, math.ceil(20.0 * comparisons / alpha))))


def _p(means_K: Floats) -> float:
    beyond = min(np.count_nonzero(means_K <= 0.0), np.count_nonzero(means_K >= 0.0))
    return min(1.0, 2.0 * beyond / means_K.size)


def _rounding(values_N: Floats) -> float:
    return ROUNDING * float(np.abs(values_N).sum())


def _subset_means(values_N: Floats, patterns: int) -> Floats:
    """Return the means of subsets, then of their complements; -inf and inf for an empty one."""
    sums_P, sizes_P = _all_subsets(values_N) if values_N.size <= EXACT_SEEDS else _drawn_subsets(values_N, patterns)
    rounding = _rounding(values_N)
    is_whole_P = (sizes_P == 0) | (sizes_P == values_N.size)
    sides = []
    for side_sums_P, side_sizes_P, bound in (
        (sums_P, sizes_P, -np.inf),
        (values_N.sum() - sums_P, values_N.size - sizes_P, np.inf),
    ):
        settled_P = np.where(np.abs(side_sums_P) <= rounding, 0.0, side_sums_P)
        sides.append(np.where(is_whole_P, bound, settled_P / np.where(is_whole_P, 1.0, side_sizes_P)))
    return np.concatenate(sides)


def _all_subsets(values_N: Floats) -> tuple[Floats, Floats]:
    """Return sums and sizes of every subset without the last seed: with the complements these are all subsets."""
    sums_P, sizes_P = np.zeros(1), np.zeros(1)
    for value in values_N[:-1]:
        sums_P, sizes_P = np.concatenate([sums_P, sums_P + value]), np.concatenate([sizes_P, sizes_P + 1.0])
    return sums_P, sizes_P


def _drawn_subsets(values_N: Floats, patterns: int) -> tuple[Floats, Floats]:
    """Return sums and sizes of the empty subset and of `patterns` - 1 drawn ones."""
    stream = _SEEDS.stream("compare", "sign flips")
    sums, sizes = [np.zeros(1)], [np.zeros(1)]
    for start in range(1, patterns, _CHUNK):
        shape = (min(_CHUNK, patterns - start), values_N.size)
        chosen_PN = stream.integers(0, 2, size=shape, dtype=np.int8).astype(np.float64)
        sums.append(chosen_PN @ values_N)
        sizes.append(chosen_PN.sum(axis=1))
    return np.concatenate(sums), np.concatenate(sizes)


def _all_exchanges(left_N: Floats, right_N: Floats) -> Floats:
    """Return differences of the means of k runs of each side, for every choice of them, 0 < k < N."""
    found = []
    for k in range(1, left_N.size):
        chosen_CK = np.array(list(combinations(range(left_N.size), k)))
        left_C, right_C = (side_N[chosen_CK].mean(axis=1) for side_N in (left_N, right_N))
        found.append((right_C[:, None] - left_C[None, :]).ravel())
    return np.concatenate(found) if found else np.zeros(0)


def _drawn_exchanges(left_N: Floats, right_N: Floats, patterns: int) -> Floats:
    """Return the same of `patterns` - 1 drawn deals, each followed by the difference of the runs that stay."""
    stream, size = _SEEDS.stream("compare", "exchanges"), left_N.size
    found = []
    for start in range(1, patterns, _CHUNK):
        dealt_PM = np.repeat(np.arange(2 * size)[None] < size, min(_CHUNK, patterns - start), axis=0)
        stays_PN, comes_PN = np.split(stream.permuted(dealt_PM, axis=1), 2, axis=1)
        for left_PN, right_PN, bound in ((~stays_PN, comes_PN, -np.inf), (stays_PN, ~comes_PN, np.inf)):
            size_P = right_PN.sum(axis=1)
            # The observed deal and its mirror bound nothing.
            is_whole_P = (size_P == 0) | (size_P == size)
            means_P = (right_PN @ right_N - left_PN @ left_N) / np.maximum(size_P, 1)
            found.append(np.where(is_whole_P, bound, means_P))
    return np.concatenate(found)
