"""The chance that a sequential test will still reject, if the differences go on as they began."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats.sequential import SequentialFlip

FUTURES = 200
DRAWN = 999
LEAST_SEEDS = 3  # fewer say nothing about the spread


def conditional_power(
    diffs_N: Floats, *, counts_K: Sequence[int], looks: Sequence[int], spend: Spend, alpha: float
) -> float | None:
    """Share of 200 possible futures in which the test rejects at `alpha` by its last look, see `conditional_powers`."""
    powers = conditional_powers(diffs_N, counts_K=counts_K, looks=looks, spend=spend, alpha=alpha)
    return None if powers is None else sum(powers)


def conditional_powers(
    diffs_N: Floats, *, counts_K: Sequence[int], looks: Sequence[int], spend: Spend, alpha: float
) -> tuple[float, float] | None:
    """The same apart by the side of the mean difference in the end: at most zero, and above it.

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
    coming_FN = mean + sd * Seeds(0).stream("compare", "futures", n_max).standard_normal((FUTURES, n_max - taken))
    later_K = [seen + look - taken for look in looks[len(counts_K) :]]
    rejected = [0, 0]
    for coming_N in coming_FN:
        test = SequentialFlip(
            diffs_N=np.concatenate([diffs_N[:seen], coming_N]),
            counts_K=[*counts_K, *later_K],
            shares_K=[look / n_max for look in looks],
            n_max=n_max,
            spend=spend,
            drawn=DRAWN,
        )
        rejected[int(test.diffs_N.sum() > 0.0)] += test.rejected_at(alpha) is not None
    return rejected[0] / FUTURES, rejected[1] / FUTURES
