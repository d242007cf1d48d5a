"""Two conditions over the same seeds: tests, intervals and effect sizes of the differences. scipy does the statistics.

`diffs_N` are differences (condition minus baseline), one per seed that both have. Differences of independent runs are
symmetric around zero when the conditions do not differ, which is all that the sign-flip test assumes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

EXACT_SEEDS = 12  # 4,096 sign patterns; with more seeds, patterns are sampled
RESAMPLES = 9_999
MOST_RESAMPLES = 199_999
_STREAMS = Seeds(0)  # fixed, so that a comparison is reproducible


def sign_flip_p(diffs_N: Floats, *, resamples: int = RESAMPLES) -> float:
    """Two-sided p of the mean difference under flipping signs: of all 2^n patterns up to 12 seeds, else of drawn ones.

    p is the share of patterns with a mean at least as far from zero as the observed one, itself included.
    """
    if diffs_N.size > EXACT_SEEDS:
        from scipy.stats import permutation_test

        def mean(x: Floats, axis: int = -1) -> Any:
            return x.mean(axis=axis)

        options: dict[str, Any] = {"permutation_type": "samples", "vectorized": True, "n_resamples": resamples}
        stream = _STREAMS.stream("compare", "sign flips")
        return float(permutation_test((diffs_N,), mean, **options, batch=10_000, rng=stream).pvalue)
    sums = _signs(diffs_N.size) @ diffs_N
    slack = 1e-12 * float(np.abs(diffs_N).sum())  # equal means may differ in the last digit
    return float(np.mean(np.abs(sums) >= abs(diffs_N.sum()) - slack))


def smallest_p(num_seeds: int, *, resamples: int = RESAMPLES) -> float:
    """The smallest p that so many non-zero differences can have: 2 / 2^n when exact, 2 / (resamples + 1) when drawn."""
    return 2.0 ** (1 - num_seeds) if 0 < num_seeds <= EXACT_SEEDS else (2.0 / (resamples + 1) if num_seeds else 1.0)


def resamples_for(comparisons: int, alpha: float) -> int:
    """Enough drawn sign patterns that the Holm correction over so many comparisons leaves room below alpha."""
    return int(min(MOST_RESAMPLES, max(RESAMPLES, np.ceil(20.0 * comparisons / alpha))))


def bca_interval(diffs_N: Floats, *, level: float) -> tuple[float, float] | None:
    """Bias-corrected and accelerated bootstrap interval of the mean difference (Efron 1987); None below two seeds.

    Equal differences have no spread to resample: the interval is that one point.
    """
    if diffs_N.size < 2:
        return None
    if np.ptp(diffs_N) == 0.0:
        return float(diffs_N[0]), float(diffs_N[0])
    from scipy.stats import bootstrap

    options: dict[str, Any] = {"method": "BCa", "n_resamples": RESAMPLES, "confidence_level": level}
    stream = _STREAMS.stream("compare", "bootstrap")
    peak = float(np.abs(diffs_N).max())
    # Rounded, so that means that tie in one unit tie in every unit: they decide on which side of 0 a limit lies.
    unitless_N = np.round(diffs_N / peak, 12)
    interval = bootstrap((unitless_N,), np.mean, **options, rng=stream).confidence_interval
    low, high = peak * float(interval.low), peak * float(interval.high)
    return (low, high) if np.isfinite(low) and np.isfinite(high) else None


def t_interval(values_N: Floats, *, level: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean over seeds; None below two seeds."""
    if values_N.size < 2:
        return None
    from scipy.stats import t

    mean, half = float(values_N.mean()), float(values_N.std(ddof=1) / np.sqrt(values_N.size))
    half *= float(t.ppf(0.5 + level / 2, values_N.size - 1))
    return mean - half, mean + half


def paired_d(diffs_N: Floats) -> float | None:
    """Cohen's d_z: mean difference over the standard deviation of the differences; None without spread."""
    sd = spread(diffs_N)
    return float(diffs_N.mean()) / sd if sd else None


def pooled_d(baseline_N: Floats, condition_N: Floats) -> float | None:
    """Cohen's d: mean difference over the root mean square of both standard deviations; None without spread."""
    if baseline_N.size < 2:
        return None
    sd = float(np.sqrt((baseline_N.var(ddof=1) + condition_N.var(ddof=1)) / 2))
    return float(condition_N.mean() - baseline_N.mean()) / sd if sd else None


def spread(diffs_N: Floats) -> float | None:
    """Standard deviation of the differences (n - 1); None below two seeds, 0 when they are all equal."""
    if diffs_N.size < 2:
        return None
    return 0.0 if np.ptp(diffs_N) == 0.0 else float(diffs_N.std(ddof=1))


@cache
def _signs(num_seeds: int) -> Floats:
    """Every pattern of n signs, (2^n, n)."""
    bits_PN = (np.arange(2**num_seeds)[:, None] >> np.arange(num_seeds)) & 1
    return np.asarray(1.0 - 2.0 * bits_PN, dtype=np.float64)
