"""Coverage of the intervals: of differences over seeds, and of shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.observe.metrics.evaluate import rate_interval
from retrain.verdicts.stats.binomial import binomial_limits, held_out_limits
from retrain.verdicts.stats.flip import FlipTest

EXAMPLES, SAMPLES = 64, 4
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
                covers_S = _covers([FlipTest.of(diffs_N).interval(0.95) for diffs_N in diffs_SN], true)
                what = f"95 % interval covers, {law} differences, {num_seeds} seeds"
                yield share(what, covers_S) if is_skewed else share(what, covers_S, at_least=0.94, at_most=0.975)


def binomial_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Exact limits of one run's pass@k or rate cover, down to chances at which nearly every count is 0 or all."""
    for examples in (16, 64, 256):
        for chance in (0.5, 0.9, 0.98, 0.999):
            rng = seeds.stream("binomial coverage", examples, str(chance))
            limits = [binomial_limits(int(right), examples) for right in rng.binomial(examples, chance, simulations)]
            what = f"exact 95 % limits cover, {examples} examples, chance {chance}"
            yield share(what, _covers(limits, chance), at_least=0.95)


def condition_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """A condition's held-out rate: limits over seeds and examples cover the rate over all seeds and all examples."""
    for mean_logit in (0.5, 4.0, 6.0):
        for num_seeds in (1, 2, 4, 8):
            spread_E, spread_N, spread_NE = 1.5, 0.0 if num_seeds == 1 else 0.5, 0.5
            rng = seeds.stream("condition coverage", str(mean_logit), num_seeds)
            everything = rng.normal(mean_logit, np.sqrt(spread_E**2 + spread_N**2 + spread_NE**2), 400_000)
            true = float(_chance(everything).mean())
            limits = []
            for _ in range(simulations):
                logits_NE = mean_logit + rng.normal(0, spread_E, EXAMPLES) + rng.normal(0, spread_N, (num_seeds, 1))
                logits_NE = logits_NE + rng.normal(0, spread_NE, (num_seeds, EXAMPLES))
                rates_N = rng.binomial(SAMPLES, _chance(logits_NE)).mean(axis=1) / SAMPLES
                limits.append(held_out_limits(rates_N, EXAMPLES))
            what = f"95 % limits of a condition cover, rate {100 * true:.1f} %, {num_seeds} x {EXAMPLES} examples"
            yield share(what, _covers(limits, true), at_least=0.95)


def evaluation_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """`eval_ci_low` and `eval_ci_high` of one policy cover its rate over all examples."""
    for mean_logit, spread_E in ((0.5, 1.5), (4.0, 1.5), (6.0, 1.5), (4.0, 0.0), (6.0, 4.0)):
        for samples in (1, SAMPLES):
            rng = seeds.stream("evaluation coverage", str(mean_logit), str(spread_E), samples)
            true = float(_chance(rng.normal(mean_logit, spread_E, 400_000)).mean())
            chances_SE = _chance(rng.normal(mean_logit, spread_E, (simulations, EXAMPLES)))
            limits = [rate_interval(rng.binomial(samples, chance_E) / samples, samples) for chance_E in chances_SE]
            what = f"95 % interval of an evaluation covers, rate {100 * true:.1f} %, sd {spread_E} logit"
            yield share(f"{what}, {EXAMPLES} x {samples}", _covers(limits, true), at_least=0.95)


def _covers(limits: list[tuple[float, float]], true: float) -> np.ndarray:
    limits_S2 = np.array(limits)
    return np.asarray((limits_S2[:, 0] <= true) & (true <= limits_S2[:, 1]))


def _chance(logits: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))


CLAIMS: Mapping[str, Claim] = {
    "flip-coverage": flip_coverage,
    "binomial-coverage": binomial_coverage,
    "condition-coverage": condition_coverage,
    "evaluation-coverage": evaluation_coverage,
}
