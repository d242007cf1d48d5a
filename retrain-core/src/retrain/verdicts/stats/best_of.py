"""The expected best of k configurations, and its interval.

With the empirical distribution of the values of N configurations, the best of k has P(best <= v) = F(v)^k, so its
expectation is the sum of the sorted values, each times (i / N)^k - ((i - 1) / N)^k (J. Dodge et al., "Show Your Work",
EMNLP 2019, arXiv:1909.03004). Intervals are percentiles over configurations that are drawn again. Larger values are
better; configurations must be independent draws, so for a search that learns from its trials both only describe it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

DRAWS = 2_000
LEVEL = 0.95
# Fixed, so that a comparison is reproducible.
_STREAMS = Seeds(0)

Interval = tuple[float, float]


def expected_best(values_N: Floats, sizes_K: Sequence[int]) -> Floats:
    """Return the expected best of each number of configurations; further axes of `values_N` may stand in front."""
    share_N = np.arange(values_N.shape[-1] + 1) / values_N.shape[-1]
    weights_NK = np.diff(share_N[:, None] ** np.asarray(sizes_K), axis=0)
    return np.asarray(np.sort(values_N, axis=-1) @ weights_NK)


def best_intervals(values_N: Floats, sizes_K: Sequence[int]) -> list[Interval]:
    """Return an interval of the expected best of each number."""
    return [_percentiles(each) for each in expected_best(_drawn(values_N, 0), sizes_K).T]


def difference_of_best(first_N: Floats, second_N: Floats, size: int) -> tuple[float, Interval]:
    """Return the second's expected best of `size` configurations minus the first's, with an interval."""
    found = [expected_best(values, [size])[..., 0] for values in (first_N, second_N)]
    drawn = [expected_best(_drawn(values, side), [size])[..., 0] for side, values in enumerate((first_N, second_N))]
    return float(found[1] - found[0]), _percentiles(drawn[1] - drawn[0])


def _drawn(values_N: Floats, side: int) -> Floats:
    rng = _STREAMS.stream("best of", side, values_N.size)
    return np.asarray(values_N[rng.integers(0, values_N.size, (DRAWS, values_N.size))])


def _percentiles(values_D: Floats) -> Interval:
    low, high = np.quantile(values_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
