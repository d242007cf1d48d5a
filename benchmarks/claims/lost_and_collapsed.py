"""Lost and collapsed seeds: the second line of a verdict, the flag, and the chance that another seed is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt

import numpy as np
from scipy.stats import norm

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Direction
from retrain.verdicts.stats.binomial import improvement_in_pairs, improvement_of_all_pairs
from retrain.verdicts.study.comparison import Comparison, Verdict, collapsed
from retrain.verdicts.study.factorial import Factorial
from retrain.verdicts.study.judge import Pairing, judge, with_values
from retrain.verdicts.study.safeguards import with_lost

ALPHA, CRASHED = 0.05, 0.15
SEED_COUNTS = (8, 10, 12)
FALLS = (2.0, 4.0, 6.0)  # how far a collapse falls, in standard deviations of seeds


def judged(values: Mapping[str, Mapping[int, float]], seeds: int) -> Comparison:
    """The comparison of conditions a and b, some of whose seeds were lost, as `retrain compare` judges it."""
    empty = Pairing(baseline="a", condition="b", seeds=(), baseline_N=np.zeros(0), condition_N=np.zeros(0))
    pairings = [with_values(empty, values["a"], values["b"])]

    def family(given: object) -> tuple[Comparison, ...]:
        return judge(given, alpha=ALPHA, direction=Direction.HIGHER)  # type: ignore[arg-type]

    lost = {label: tuple(seed for seed in range(seeds) if seed not in values[label]) for label in values}
    return with_lost(
        *(family(pairings), pairings, values, lost),
        direction=Direction.HIGHER,
        judged=family,
        factorial=Factorial(),
    )[0]


def lost_runs(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """No difference, but 15 % of the runs of one condition crash: those that would have ended lowest, or collapses.

    In the first case both conditions have one law. In the others the crashed runs would have fallen so many standard
    deviations, and the rest is so much better that the means over all runs are equal: where a run would fall far below
    anything seen, the worst value seen is still too good.
    """
    for fall in (None, *FALLS):
        for num_seeds in SEED_COUNTS:
            rng = seeds.stream("lost runs", str(fall), num_seeds)
            first, second = [], []
            for _ in range(simulations):
                a_N, b_N = rng.normal(0.0, 1.0, num_seeds), rng.normal(CRASHED * (fall or 0.0), 1.0, num_seeds)
                is_lost_N = b_N < norm.ppf(CRASHED) if fall is None else rng.random(num_seeds) < CRASHED
                values = {
                    "a": dict(enumerate(a_N.tolist())),
                    "b": {seed: value for seed, value in enumerate(b_N.tolist()) if not is_lost_N[seed]},
                }
                found = judged(values, num_seeds)
                first.append(found.verdict is Verdict.BETTER)
                second.append((found.lost or found).verdict is Verdict.BETTER)
            what = "the lowest 15 % crash" if fall is None else f"15 % crash that would fall {fall:g} sd"
            where = f"{what}, {num_seeds} seeds"
            yield share(f"false 'better' without the lost runs, {where}", np.array(first))
            line = f"false 'better' with them at the worst value, {where}"
            yield share(line, np.array(second), at_most=0.05 if fall is None else None)


def collapse_flags(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """How often a condition is flagged without a collapse, and how many of the collapsed seeds are found."""
    for num_seeds in SEED_COUNTS:
        rng = seeds.stream("collapse", num_seeds)
        flags, hits = [], []
        for _ in range(simulations):
            flags.append(bool(collapsed([rng.normal(size=num_seeds), rng.normal(size=num_seeds)])[0]))
            fallen_N = rng.random(num_seeds) < CRASHED
            values_N = rng.normal(size=num_seeds) - 20.0 * fallen_N
            found = collapsed([values_N, rng.normal(size=num_seeds)])[0]
            hits += [index in found for index in np.flatnonzero(fallen_N)]
        yield share(f"flagged without a collapse, normal seeds, {num_seeds} of each condition", np.array(flags))
        yield share(f"collapses of 20 sd that are flagged, 15 % of {num_seeds} seeds", np.array(hits))


def improvement(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % limits of the chance that a seed is better cover it: in pairs, of all pairs, and rliable's bootstrap."""
    for effect in (0.0, 1.0, 2.0):
        for num_seeds in SEED_COUNTS:
            rng, true = seeds.stream("improvement", str(effect), num_seeds), float(norm.cdf(effect / sqrt(2.0)))
            pairs, all_pairs, bootstrap = [], [], []
            for _ in range(simulations):
                a_N, b_N = rng.normal(size=num_seeds), rng.normal(effect, 1.0, num_seeds)
                in_pairs, of_all = improvement_in_pairs(b_N - a_N), improvement_of_all_pairs(a_N, b_N)
                pairs.append(in_pairs is not None and in_pairs.interval[0] <= true <= in_pairs.interval[1])
                all_pairs.append(of_all is not None and of_all.interval[0] <= true <= of_all.interval[1])
                rows_2RN = rng.integers(num_seeds, size=(2, 500, num_seeds))
                drawn_R = (b_N[rows_2RN[1]][:, :, None] > a_N[rows_2RN[0]][:, None, :]).mean(axis=(1, 2))
                low, high = np.quantile(drawn_R, [0.025, 0.975])
                bootstrap.append(low <= true <= high)
            where = f"{num_seeds} seeds, P = {true:.2f}"
            yield share(f"exact limits of the pairs cover, {where}", np.array(pairs), at_least=0.95)
            yield share(f"limits of all pairs cover, {where}", np.array(all_pairs), at_least=0.94)
            yield share(f"rliable's bootstrap of all pairs covers, {where}", np.array(bootstrap))


CLAIMS: Mapping[str, Claim] = {
    "lost-runs": lost_runs,
    "collapse-flags": collapse_flags,
    "improvement": improvement,
}
