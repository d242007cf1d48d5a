"""The expected best of k configurations with an interval, and a test of two conditions at the same k.

With the empirical distribution of the values of N configurations, the best of k has P(best <= v) = F(v)^k, so its
expectation is the sum of the sorted values, each times (i / N)^k - ((i - 1) / N)^k (J. Dodge et al., "Show Your Work",
EMNLP 2019, arXiv:1909.03004). Larger values are better. Intervals are percentiles over configurations that are drawn
again; of few configurations they cover less than 95 %, so no verdict rests on them. The test exchanges the two
conditions: it is exact if they are equal and the configurations are independent draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

DRAWS = 2_000
LEVEL = 0.95
ROUNDING = 1e-12
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
    drawn_DN = _STREAMS.stream("best of", values_N.size).choice(values_N, (DRAWS, values_N.size))
    low_K, high_K = np.quantile(expected_best(drawn_DN, sizes_K), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0).tolist()
    return list(zip(low_K, high_K, strict=True))


def exchange_p(first_N: Floats, second_N: Floats, size: int, *, are_pairs: bool) -> tuple[float, float]:
    """Return the second's expected best of `size` minus the first's, and its two-sided p.

    With `are_pairs`, both tried the same configurations, which are exchanged one by one; otherwise all are dealt again.
    """
    rng, both = _STREAMS.stream("exchange", first_N.size), np.concatenate([first_N, second_N])
    if are_pairs:
        swapped_DN = rng.random((DRAWS, first_N.size)) < 0.5
        dealt = np.concatenate([np.where(swapped_DN, second_N, first_N), np.where(swapped_DN, first_N, second_N)], -1)
    else:
        dealt = rng.permuted(np.broadcast_to(both, (DRAWS, both.size)), axis=-1)
    sides = (np.vstack([both, dealt])[:, : first_N.size], np.vstack([both, dealt])[:, first_N.size :])
    found_D = np.subtract(*(expected_best(side, [size])[:, 0] for side in reversed(sides)))
    return float(found_D[0]), float(np.mean(np.abs(found_D) >= abs(found_D[0]) - ROUNDING))
