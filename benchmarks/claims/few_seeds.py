"""Few seeds: the estimate without a verdict, the unpaired test, and two single runs over their examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, mean, share
from claims.examples import Law
from claims.verdicts import ALPHA, LAWS
from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Direction
from retrain.verdicts.stats.crossed import crossed
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.judge import Pairing, judge

FEW = (3, 4, 5)
EXAMPLES = 64


def few_seeds_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Intervals of three to five seeds cover the difference over all seeds and examples; and how wide they are."""
    for num_seeds in FEW:
        for interaction, effect in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
            law = Law(interaction=interaction, effect=effect)
            rng = seeds.stream("few seeds", num_seeds, f"{interaction} {effect}")
            true = law.truth(rng)[0]
            found_S2 = np.array([_crossed(law.diffs_NE(rng, num_seeds, EXAMPLES)) for _ in range(simulations)])
            what = f"{num_seeds} x {EXAMPLES}, interaction {interaction:g}, effect {effect:g} logits"
            yield share(f"estimate covers, {what}", _covers(found_S2, true), at_least=0.93)
            yield mean(f"its mean width, {what}", found_S2[:, 1] - found_S2[:, 0])
        for law_name in ("normal", "t2", "lognormal"):
            rng = seeds.stream("few seeds t", num_seeds, law_name)
            diffs_SN = LAWS[law_name](rng, (2, simulations * num_seeds)).reshape(2, simulations, num_seeds)
            found_S2 = np.array([t_interval(each_N) for each_N in diffs_SN[1] - diffs_SN[0]])
            yield share(f"Student's t covers, {num_seeds} seeds of one law, {law_name}", _covers(found_S2, 0.0))


def unpaired_verdicts(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """The unpaired test: any false verdict, and how often it and pairing find two standard deviations."""
    for conditions, seed_counts in ((2, (4, 6, 8)), (5, (5, 8))):
        for law in LAWS:
            at_most = None if law == "normal with spreads 1 to 4" else 0.055
            for num_seeds in seed_counts:
                rng = seeds.stream("unpaired", conditions, law, num_seeds)
                draws = (LAWS[law](rng, (conditions, num_seeds)) for _ in range(simulations))
                found_S = np.array([any(_verdicts(values_CN, is_paired=False)) for values_CN in draws])
                yield share(
                    f"any false verdict, unpaired, {conditions} conditions, {num_seeds} seeds, {law}",
                    found_S,
                    at_most=at_most,
                )
    gains_C = np.array([[0.0], [2.0], [0.0], [0.0], [0.0]])
    for num_seeds in (5, 8):
        for is_paired in (False, True):
            rng = seeds.stream("unpaired power", num_seeds)
            draws = (rng.standard_normal((5, num_seeds)) + gains_C for _ in range(simulations))
            found_S = np.array([_verdicts(values_CN, is_paired=is_paired)[0] for values_CN in draws])
            name = "paired" if is_paired else "unpaired"
            yield share(f"2 sd found, {name}, 5 conditions, {num_seeds} seeds", found_S)


def two_runs_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """The interval of two single runs covers their difference over all examples like these."""
    for examples in (64, 256):
        for interaction, effect in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
            rng = seeds.stream("two runs", examples, f"{interaction} {effect}")
            law = Law(interaction=interaction, effect=effect)
            covers = []
            for _ in range(simulations):
                many_E = law.diffs_NE(rng, 1, 20_000)[0]  # of two runs: their true difference, and a sample of it
                result = crossed(rng.choice(many_E, (1, examples), replace=False)).examples
                low, high = result.interval if result else (0.0, 0.0)
                covers.append(low <= many_E.mean() <= high)
            what = f"{examples} examples, interaction {interaction:g}, effect {effect:g} logits"
            yield share(f"interval of two runs covers, {what}", np.array(covers), at_least=0.93)


def _crossed(diffs_NE: np.ndarray) -> tuple[float, float]:
    both = crossed(diffs_NE).both
    return both.interval if both else (0.0, 0.0)


def _covers(found_S2: np.ndarray, true: float) -> np.ndarray:
    return (found_S2[:, 0] <= true) & (true <= found_S2[:, 1])


def _verdicts(values_CN: np.ndarray, *, is_paired: bool) -> list[bool]:
    """True for each condition that is called better or worse than the first."""
    seeds = tuple(range(values_CN.shape[1]))
    pairings = [
        Pairing(
            baseline="0",
            condition=str(index),
            seeds=seeds,
            baseline_N=values_CN[0],
            condition_N=values_N,
            is_paired=is_paired,
        )
        for index, values_N in enumerate(values_CN[1:], 1)
    ]
    judged = judge(pairings, alpha=ALPHA, direction=Direction.HIGHER)
    return [each.verdict is not Verdict.CANNOT_TELL for each in judged]


CLAIMS: Mapping[str, Claim] = {
    "few-seeds-coverage": few_seeds_coverage,
    "unpaired-verdicts": unpaired_verdicts,
    "two-runs-coverage": two_runs_coverage,
}
