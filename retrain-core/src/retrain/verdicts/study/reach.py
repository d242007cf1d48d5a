"""Computes before any run if a number of seeds can reach a verdict, and the fewest that can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.records.runs.registered import Spend
from retrain.text.amounts import counted
from retrain.verdicts.stats.flip import EXACT_EXCHANGES, EXACT_SEEDS, at_most, fewest_exchanged, patterns_for
from retrain.verdicts.stats.paired import least_seeds
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip, fewest_equal
from retrain.verdicts.study.comparison import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The clearest result that a number of seeds allows: the same difference in all of them.

    `comparisons` are those of Holm's correction: conditions against the baseline, without controls. `smallest_p` is of
    one comparison, before the correction. `idle_looks` are planned looks that no result could end, `first_look` the
    fewest seeds after which a first look can.
    """

    design: Design
    num_seeds: int
    comparisons: int
    alpha: float
    smallest_p: float
    fewest_seeds: int
    idle_looks: tuple[int, ...] = ()
    first_look: int | None = None

    @property
    def can_decide(self) -> bool:
        return at_most(self.comparisons * self.smallest_p, self.alpha)


def reach_of(
    design: Design,
    *,
    num_seeds: int,
    comparisons: int,
    alpha: float,
    looks: Sequence[int] = (),
    spend: Spend = Spend.POCOCK,
) -> Reach:
    """Return the reach of `num_seeds` seeds per condition under the test of `design` with the planned `looks`."""
    share = alpha / comparisons

    def can_end(*taken: int) -> bool:
        return at_most(_at_looks(taken, looks, spend), share)

    idle = [look for number, look in enumerate(looks, start=1) if not can_end(*looks[:number])]
    fewest = {Design.UNPAIRED: fewest_exchanged, Design.ANYTIME: fewest_equal}.get(design, least_seeds)
    return Reach(
        design=design,
        num_seeds=num_seeds,
        comparisons=comparisons,
        alpha=alpha,
        smallest_p=_at_looks(looks, looks, spend) if looks else _smallest_p(design, num_seeds, comparisons, alpha),
        fewest_seeds=fewest(share),
        idle_looks=tuple(idle),
        first_look=next(filter(can_end, range(1, looks[-1] + 1)), None) if idle else None,
    )


def reach_sentences(reach: Reach) -> list[str]:
    """Return warnings before the first run, with a fix; empty where the plan can reach a verdict."""
    if reach.can_decide:
        looks, first = ", ".join(map(str, reach.idle_looks)), reach.first_look
        told = f"no result can end the look after {looks} seeds; begin with a look after {first} or more"
        return [told] if looks else []
    holm = ""
    if reach.comparisons > 1:
        corrected = min(1.0, reach.comparisons * reach.smallest_p)
        holm = f" ({corrected:.2g} after Holm's correction over {reach.comparisons} comparisons)"
    seeds = counted(reach.num_seeds, "seed")
    fix = f"plan at least {reach.fewest_seeds}"
    if reach.design is Design.FIXED and reach.num_seeds >= fewest_exchanged(reach.alpha / reach.comparisons):
        fix += ', or [campaign.plan] test = "unpaired"'
    return [f"no verdict is possible. {seeds}: smallest possible p {reach.smallest_p:.2g}{holm}; {fix}"]


def _smallest_p(design: Design, num_seeds: int, comparisons: int, alpha: float) -> float:
    if num_seeds < 2:
        return 1.0
    drawn = 1.0 / patterns_for(comparisons, alpha)
    if design is Design.ANYTIME:
        return AnytimeTest(diffs_N=np.ones(num_seeds)).p
    if design is Design.UNPAIRED:
        return 2.0 / math.comb(2 * num_seeds, num_seeds) if num_seeds <= EXACT_EXCHANGES else drawn
    return 2.0 ** -(num_seeds - 1) if num_seeds <= EXACT_SEEDS else drawn


def _at_looks(taken: Sequence[int], looks: Sequence[int], spend: Spend) -> float:
    """Return the least p after these looks of the planned ones."""
    test = SequentialFlip(
        diffs_N=np.ones(taken[-1]),
        counts_K=list(taken),
        shares_K=[look / looks[-1] for look in taken],
        n_max=looks[-1],
        spend=spend,
    )
    return test.smallest_p
