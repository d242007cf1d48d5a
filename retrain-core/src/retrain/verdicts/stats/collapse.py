"""Seeds that lie far below the others of their condition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.kernel.types import Floats

FAR = 5.0  # robust standard deviations
LEAST_SEEDS = 4  # of three, one is always alone
_NORMAL = 1.4826  # median absolute deviation of a normal law, in standard deviations, is 1 / 1.4826
_ROUNDING = 1e-9


def collapsed(values_by_condition: Sequence[Floats], *, least_gap: float = 0.0) -> list[list[int]]:
    """Per condition, the indices of values that lie far below its median.

    Far is both `FAR` robust standard deviations and `least_gap`. The robust standard deviation is 1.4826 times the
    median absolute deviation from the median, the larger of the condition's own and that over all conditions, each
    around its own median: neither a handful of close seeds nor a condition that spreads by nature raises a flag. A
    condition with fewer than four values has none. Turn the sign of the values where lower is better.
    """
    gaps = [np.median(values_N) - values_N if values_N.size else values_N for values_N in values_by_condition]
    known = [gaps_N for gaps_N in gaps if gaps_N.size >= LEAST_SEEDS]
    if not known:
        return [[] for _ in gaps]
    common = float(np.median(np.abs(np.concatenate(known))))
    found: list[list[int]] = []
    for gaps_N in gaps:
        if gaps_N.size < LEAST_SEEDS:
            found.append([])
            continue
        spread = _NORMAL * max(common, float(np.median(np.abs(gaps_N))))
        limit = max(FAR * spread, least_gap, _ROUNDING)
        found.append([int(index) for index in np.flatnonzero(gaps_N > limit)])
    return found
