"""The expected best of k configurations with an interval, and a test of two conditions at the same k.

With the empirical distribution of the values of N configurations, the best of k has P(best <= v) = F(v)^k, so its
expectation is the sum of the sorted values, each times (i / N)^k - ((i - 1) / N)^k (J. Dodge et al., "Show Your Work",
EMNLP 2019, arXiv:1909.03004). Larger values are better. Intervals are percentiles over configurations that are drawn
again; of few configurations they cover less than 95 %, so no verdict rests on them. The test exchanges what both
conditions tried at the same place of their searches: it is exact if these places are independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats, Mask

DRAWS = 2_000
LEVEL = 0.95
ROUNDING = 1e-12
GROUP_RANK = 11  # 2,048 exchanges
# Fixed, so that a comparison is reproducible.
_STREAMS = Seeds(0)

Interval = tuple[float, float]
Blocks = Mapping[Any, Sequence[float]]  # by label


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


def exchange_p(first: Blocks, second: Blocks, size: int) -> tuple[float, float]:
    """Return the second's expected best of `size` minus the first's, and its two-sided p.

    The values of a block are exchanged together: one configuration, or a whole search if it learns from its trials. A
    block that only one side has stays there.
    """
    places = {label: place for place, label in enumerate(label for label in first if label in second)}
    found = sorted(
        (value, bool(side), places.get(label, -1))
        for side, blocks in enumerate((first, second))
        for label, values in blocks.items()
        for value in values
    )
    values_M, is_second_M, places_M = (np.array(each) for each in zip(*found, strict=True))
    is_second_DM = is_second_M ^ _exchanges(len(places))[:, places_M]
    found_D = _best_of(is_second_DM, values_M, size) - _best_of(~is_second_DM, values_M, size)
    least = abs(found_D[0]) - ROUNDING * np.abs(values_M).sum()
    return float(found_D[0]), float(np.mean(np.abs(found_D) >= least))


def _best_of(members_DM: Mask, sorted_M: Floats, size: int) -> Floats:
    """Return the expected best of `size` of the members, of each row."""
    counts_DM = np.cumsum(members_DM, axis=-1)
    totals_T, row_D = np.unique(counts_DM[:, -1], return_inverse=True)
    # A table, because powers of every entry take most of the time.
    powers_TK = np.minimum(np.arange(sorted_M.size) / totals_T[:, None], 1.0) ** size
    return np.asarray(sorted_M[-1] - powers_TK[row_D[:, None], counts_DM[:, :-1]] @ np.diff(sorted_M))


def _exchanges(count: int) -> Mask:
    """Return all exchanges of `count` blocks, or a random subgroup of many; the first row, the last column move none.

    A group holds the level, whichever was drawn; independent exchanges would only on average over draws.
    """
    rank = min(count, GROUP_RANK)
    drawn = _STREAMS.stream("exchange", count).integers(0, 2, (rank, count))
    generators = np.eye(count, dtype=np.int64) if count == rank else drawn
    chosen = np.arange(2**rank)[:, None] >> np.arange(rank) & 1
    return np.pad(chosen @ generators % 2 == 1, ((0, 0), (0, 1)))
