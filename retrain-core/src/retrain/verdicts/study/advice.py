"""What more seeds and what more examples would buy, and which is the cheaper way to an interval that tells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from retrain.kernel.types import Floats
from retrain.verdicts.stats.components import (
    Draws,
    Foreseen,
    Needed,
    foreseen,
    needed,
    numbers_needed,
    true_differences,
)

SURE = 0.8  # share of the draws in which a way must be the cheaper one to be called so
CLEAR = 4  # an interval of a number needed whose ends differ by more tells too little


class Way(StrEnum):
    """What to add."""

    SEEDS = "seeds"
    EXAMPLES = "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Measured seconds: of one more seed (a run of either condition), and of one more example (in every run)."""

    seed_s: float
    example_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """About the interval on examples like these, at its level; the intervals of the advice are 80 % ones.

    `half_width` is that of today's interval, infinite where few seeds leave it without a limit; `twice_seeds` and
    `twice_examples` are what doubling either would make of it. `seeds` and `examples` are how many in all would make it
    leave out zero in 80 % of studies, the others as they are, if the true difference is the observed one; their
    intervals count in that it is not known. `cheaper` is the cheaper of the two in measured seconds, None without
    a cost or when no way is in 80 % of the draws; `chance` is the share of draws for `examples`.
    """

    half_width: float
    twice_seeds: Foreseen
    twice_examples: Foreseen
    seeds: Needed
    examples: Needed
    cost: Cost | None
    cheaper: Way | None
    chance: float | None

    def is_clear(self, way: Way) -> bool:
        """Whether the number needed is known well enough to be of use: both ends of its interval within a factor."""
        low, high = (self.seeds if way is Way.SEEDS else self.examples).interval
        return low is not None and high is not None and high <= CLEAR * low


def advise(
    draws: Draws,
    *,
    difference: float,
    half_width: float,
    level: float,
    num_examples: int,
    least_seeds: int,
    cost: Cost | None,
) -> Advice:
    """The advice from the drawn variance components, the observed difference and today's half-width.

    With fewer than `least_seeds` no number of examples gives a verdict, since the test over seeds cannot.
    """
    size = num_examples / draws.num_clusters  # examples in a cluster
    differences_D = true_differences(draws, difference)
    seeds_D = np.maximum(numbers_needed(draws, differences_D, of_seeds=True, level=level), least_seeds)
    examples_D = np.ceil(size * numbers_needed(draws, differences_D, of_seeds=False, level=level))
    if draws.num_seeds < least_seeds:
        examples_D = np.full_like(examples_D, np.inf)
    n, m = draws.num_seeds, draws.num_clusters
    cheaper, chance = _cheaper(seeds_D - n, examples_D - num_examples, cost)
    return Advice(
        half_width=half_width,
        twice_seeds=foreseen(draws, seeds=2 * n, clusters=m, level=level),
        twice_examples=foreseen(draws, seeds=n, clusters=2 * m, level=level),
        seeds=needed(seeds_D),
        examples=needed(examples_D),
        cost=cost,
        cheaper=cheaper,
        chance=chance,
    )


def _cheaper(seeds_D: Floats, examples_D: Floats, cost: Cost | None) -> tuple[Way | None, float | None]:
    """The way that costs less in most draws, and how often that is `examples`; draws that need nothing do not count."""
    if cost is None:
        return None, None
    seeds_D, examples_D = seeds_D * cost.seed_s, examples_D * cost.example_s
    is_open_D = (np.minimum(seeds_D, examples_D) < np.inf) & (np.maximum(seeds_D, examples_D) > 0.0)
    if not is_open_D.any():
        return None, None
    chance = float((examples_D < seeds_D)[is_open_D].mean())
    return (Way.EXAMPLES if chance >= SURE else Way.SEEDS if chance <= 1.0 - SURE else None), chance
