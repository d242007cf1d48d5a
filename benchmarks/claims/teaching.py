"""How far forecasts of teaching groups are off where prompts are either easy or impossible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured
from retrain.kernel.seeding import Seeds
from retrain.verdicts.stats.teaching import RateBook

PROMPTS, STEPS, GROUPS, SIZE = 64, 40, 8, 8
BETWEEN = (0.0, 0.1, 0.3, 1.0)  # the share of prompts with a rate uniform on 0 to 1; the others have 0.01 or 0.99


def forecast_bias(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """The mean forecast of 320 groups less their mean true chance, in points; a policy that does not change."""
    for between in BETWEEN:
        rng = seeds.stream("forecast bias", str(between))
        bias_S = np.array([_bias(rng, between) for _ in range(max(simulations // 100, 2))])
        error = float(2 * bias_S.std(ddof=1) / np.sqrt(bias_S.size))
        what = f"forecast too high by, {between:.0%} of the prompts between"
        yield Measured(what=what, figure=float(bias_S.mean()), error=error)


def _bias(rng: np.random.Generator, between: float) -> float:
    ends_P = rng.choice([0.01, 0.99], PROMPTS)
    rate_P = np.where(rng.random(PROMPTS) < between, rng.random(PROMPTS), ends_P)
    true_P = 1.0 - rate_P**SIZE - (1.0 - rate_P) ** SIZE
    book, forecast, true = RateBook(), list[float](), list[float]()
    for step in range(STEPS):
        drawn = rng.choice(PROMPTS, GROUPS, replace=False)
        forecast += book.chances([str(prompt) for prompt in drawn], step, SIZE).tolist()
        true += true_P[drawn].tolist()
        for prompt in drawn:
            book.observe(str(prompt), step, int(rng.binomial(SIZE, rate_P[prompt])), SIZE)
    return float(np.mean(forecast) - np.mean(true))


CLAIMS: Mapping[str, Claim] = {"forecast-bias": forecast_bias}
