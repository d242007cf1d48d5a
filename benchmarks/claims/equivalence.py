"""`practically the same`: how often it is said of a difference as large as the margin, and of none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Direction
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.judge import Pairing, judge, with_margin

ALPHA = 0.05
MARGINS = (1.0, 2.0)  # in standard deviations of the differences


def said_same(rng: np.random.Generator, *, true: float, margin: float, conditions: int, seeds: int) -> bool:
    """Whether any of the conditions is called practically the same as a baseline that they share."""
    baseline_N = rng.normal(0.0, np.sqrt(0.5), seeds)
    pairings = [
        Pairing(
            baseline="a",
            condition=f"c{index}",
            seeds=tuple(range(seeds)),
            baseline_N=baseline_N,
            condition_N=rng.normal(true, np.sqrt(0.5), seeds),
        )
        for index in range(conditions)
    ]
    judged = with_margin(judge(pairings, alpha=ALPHA, direction=Direction.HIGHER), pairings, margin)
    return any(each.verdict is Verdict.PRACTICALLY_SAME for each in judged)


def equivalence(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """False in at most alpha / 2 over all comparisons; how often equal conditions are called the same."""
    for conditions in (1, 4):
        for num_seeds in (8, 12):
            for margin in MARGINS:
                for true in (margin, 0.0):
                    rng = seeds.stream("equivalence", conditions, num_seeds, str(margin), str(true))
                    said_S = np.array(
                        [
                            said_same(rng, true=true, margin=margin, conditions=conditions, seeds=num_seeds)
                            for _ in range(simulations)
                        ]
                    )
                    where = f"{conditions + 1} conditions, {num_seeds} seeds, margin {margin:g} sd"
                    if true:
                        yield share(f"false 'practically the same', {where}", said_S, at_most=ALPHA / 2)
                    else:
                        yield share(f"'practically the same' of equal conditions (any), {where}", said_S)


CLAIMS: Mapping[str, Claim] = {"equivalence": equivalence}
