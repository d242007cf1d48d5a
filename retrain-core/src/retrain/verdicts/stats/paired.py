"""Two conditions over the same seeds: effect sizes and spread of the differences; Student's interval of a mean.

`diffs_N` are differences (condition minus baseline), one per seed that both have.
"""

from __future__ import annotations

import numpy as np

from retrain.kernel.types import Floats


def t_interval(values_N: Floats, *, level: float = 0.95) -> tuple[float, float] | None:
    """Return Student's t interval of the mean over seeds; None below two seeds."""
    if values_N.size < 2:
        return None
    from scipy.special import stdtrit  # what `t.ppf` is, in a third of the time that scipy.stats takes to import

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
