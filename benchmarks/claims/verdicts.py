"""False verdicts over a whole family of conditions, and verdicts that their intervals contradict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Direction
from retrain.verdicts.stats.paired import POWER, least_seeds, power_of
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.judge import Pairing, judge

ALPHA, EXAMPLES = 0.05, 64
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _rates(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.binomial(EXAMPLES, 1.0 / (1.0 + np.exp(-rng.normal(1.0, 0.3, shape)))) / EXAMPLES


LAWS: Mapping[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t2": lambda rng, shape: rng.standard_t(2, shape),
    "lognormal": lambda rng, shape: rng.lognormal(0.0, 1.0, shape),
    "normal with spreads 1 to 4": lambda rng, shape: rng.standard_normal(shape) * np.linspace(1, 4, shape[0])[:, None],
    "rates": _rates,
}


def judged(values_CN: np.ndarray) -> tuple[Comparison, ...]:
    """Every condition against the first, as `retrain compare` judges them."""
    seeds = tuple(range(values_CN.shape[1]))
    pairings = [
        Pairing(baseline="0", condition=str(index), seeds=seeds, baseline_N=values_CN[0], condition_N=values_N)
        for index, values_N in enumerate(values_CN[1:], 1)
    ]
    return judge(pairings, alpha=ALPHA, direction=Direction.HIGHER)


def false_verdicts(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Conditions of one law: the share of campaigns with any better or worse."""
    for conditions, seed_counts in ((2, (6, 8, 12)), (5, (8, 12)), (20, (10, 12))):
        for law, draw in LAWS.items():
            for num_seeds in seed_counts:
                rng = seeds.stream("false verdicts", conditions, law, num_seeds)
                found_S = [_any(judged(draw(rng, (conditions, num_seeds)))) for _ in range(simulations)]
                what = f"any false verdict, {conditions} conditions, {num_seeds} seeds, {law}"
                yield share(what, np.array(found_S), at_most=0.055)


def disagreements(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Intervals that leave out zero without a verdict, or hold it with one: there is none, whatever the family."""
    rng, wrong, total, found = seeds.stream("disagreements"), 0, 0, 0
    for _ in range(simulations):
        conditions, num_seeds = int(rng.integers(2, 21)), int(rng.integers(2, 17))
        values_CN = _rates(rng, (conditions, num_seeds)) + rng.choice([0.0, 0.0, 0.1, 0.3], (conditions, 1))
        for each in judged(values_CN):
            low, high = each.interval or (-np.inf, np.inf)
            side = Verdict.BETTER if low > 0.0 else Verdict.WORSE if high < 0.0 else Verdict.CANNOT_TELL
            wrong, total, found = wrong + (side is not each.verdict), total + 1, found + (low > 0.0 or high < 0.0)
    what = f"intervals that disagree with their verdict, of {total:,} with {found:,} verdicts"
    yield Measured(what=what, figure=wrong / total, error=0.0, at_most=0.0)


def power_at_the_computed_seeds(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """At the fewest seeds of the computed power a true difference is found in about 80 % of studies."""
    for d_z in (0.8, 1.0, 1.2, 1.5):
        num_seeds = next(n for n in count(least_seeds(ALPHA)) if power_of(n, d_z, ALPHA) >= POWER)
        rng = seeds.stream("power", str(d_z))
        found_S = [
            judged(np.stack([np.zeros(num_seeds), rng.normal(d_z, 1.0, num_seeds)]))[0].verdict is Verdict.BETTER
            for _ in range(simulations)
        ]
        yield share(f"found, d {d_z}, {num_seeds} seeds", np.array(found_S), at_least=0.77)
        found_S = [
            judged(pair_2N)[0].verdict is Verdict.BETTER
            for pair_2N in _lognormal_pairs(rng, simulations, num_seeds, d_z)
        ]
        yield share(f"found, d {d_z}, {num_seeds} seeds, differences of lognormals", np.array(found_S))


def _lognormal_pairs(rng: np.random.Generator, simulations: int, count: int, d_z: float) -> np.ndarray:
    """Pairs of lognormal draws whose difference has the mean `d_z` and the spread 1."""
    pairs_S2N = rng.lognormal(0.0, 1.0, (simulations, 2, count)) / np.sqrt(2.0 * np.expm1(1.0) * np.e)
    pairs_S2N[:, 1] += d_z
    return np.asarray(pairs_S2N)


def _any(comparisons: tuple[Comparison, ...]) -> bool:
    return any(each.verdict is not Verdict.CANNOT_TELL for each in comparisons)


CLAIMS: Mapping[str, Claim] = {
    "false-verdicts": false_verdicts,
    "disagreements": disagreements,
    "power": power_at_the_computed_seeds,
}
