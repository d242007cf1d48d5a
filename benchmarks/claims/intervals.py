"""Coverage of the intervals of differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.rooms.evidence.stats.flip import flip_interval

EXAMPLES = 64
SEED_COUNTS = (6, 7, 8, 9, 10, 11, 12)
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _binomial(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rates on 64 examples: 0.6 against 0.5."""
    return (rng.binomial(EXAMPLES, 0.6, shape) - rng.binomial(EXAMPLES, 0.5, shape)) / EXAMPLES


LAWS: Mapping[str, tuple[Draw, float]] = {
    "normal": (lambda rng, shape: rng.normal(1.0, 1.0, shape), 1.0),
    "t3": (lambda rng, shape: rng.standard_t(3, shape), 0.0),
    "binomial": (_binomial, 0.1),
}
SKEWED: Mapping[str, tuple[Draw, float]] = {
    "lognormal": (lambda rng, shape: rng.lognormal(0.0, 1.0, shape), float(np.exp(0.5))),
}


def flip_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % intervals of differences over 6 to 12 seeds cover the true mean difference."""
    for is_skewed, laws in ((False, LAWS), (True, SKEWED)):
        for law, (draw, true) in laws.items():
            for num_seeds in SEED_COUNTS:
                diffs_SN = draw(seeds.stream("flip coverage", law, num_seeds), (simulations, num_seeds))
                limits_S2 = np.array([flip_interval(diffs_N, 0.95) for diffs_N in diffs_SN])
                covers_S = (limits_S2[:, 0] <= true) & (true <= limits_S2[:, 1])
                what = f"95 % interval covers, {law} differences, {num_seeds} seeds"
                yield share(what, covers_S) if is_skewed else share(what, covers_S, at_least=0.94, at_most=0.975)


CLAIMS: Mapping[str, Claim] = {"flip-coverage": flip_coverage}
