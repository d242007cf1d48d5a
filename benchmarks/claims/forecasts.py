"""Coverage of the intervals of `retrain status --forecast` for a run of a condition that was not seen before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, mean, share
from retrain.kernel.seeding import Seeds
from retrain.verdicts.stats.conformal import forecast

COMPLETIONS, KNOWN, LENGTH = 128, 4, 12
CONDITION_COUNTS = (4, 9, 20)


def forecast_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """80 % intervals cover the last rate of a new condition, and how wide they are."""
    for count in CONDITION_COUNTS:
        rng = seeds.stream("forecast coverage", count)
        covers_S, widths_S = np.empty(simulations, bool), np.empty(simulations)
        for index in range(simulations):
            curves, names = _runs(count + 1, rng)
            past = forecast(curves[:-4, :KNOWN], curves[:-4, -1], names[:-4], curves[-1, :KNOWN])
            covers_S[index] = past.low <= curves[-1, -1] <= past.high
            widths_S[index] = min(1.0, past.high) - max(0.0, past.low)
        what = f"80 % interval after {KNOWN} of {LENGTH} evaluations, {count} conditions of 4 runs"
        yield share(f"{what}: covers", covers_S, at_least=0.8)
        yield mean(f"{what}: mean width", widths_S)


def _runs(count: int, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """Four learning curves of each condition, whose speed and ceiling are drawn; seeds vary around them."""
    speed_C, ceiling_C = rng.lognormal(0.0, 0.7, count), rng.beta(8, 2, count)
    conditions = np.repeat(np.arange(count), 4)
    times = np.arange(LENGTH) / LENGTH
    ceiling_N = ceiling_C[conditions] + rng.normal(0.0, 0.02, conditions.size)
    rises = 1.0 - np.exp(-3.0 * speed_C[conditions, None] * times)
    rates = np.clip(0.3 + (ceiling_N[:, None] - 0.3) * rises, 0.0, 1.0)
    return rng.binomial(COMPLETIONS, rates) / COMPLETIONS, conditions.tolist()


CLAIMS: Mapping[str, Claim] = {"forecast-coverage": forecast_coverage}
