"""Estimates a difference where seeds are too few for a verdict, so that three seeds say more than nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison import Comparison, FewSeeds, VerdictReason

FEWEST = 3  # Student's t of two seeds is about six times as wide as of four


def with_few_seeds(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """The comparisons, with an estimate where three seeds or more cannot reach a verdict.

    By crossed effects of seeds and examples where every example is on record, otherwise Student's t over the paired
    differences of the seeds. Both assume roughly normal seeds, which so few can neither show nor refute.
    """
    return tuple(
        replace(each, few_seeds=_estimate(each)) if each.cause is VerdictReason.TOO_FEW else each
        for each in comparisons
    )


def _estimate(comparison: Comparison) -> FewSeeds | None:
    seeds, level = comparison.per_seed, 1.0 - comparison.alpha
    if seeds is None or len(seeds.baseline) < FEWEST:
        return None
    if comparison.examples and comparison.examples.normal:
        return FewSeeds(interval=comparison.examples.normal, level=level, is_of_examples=True)
    interval = t_interval(np.array(seeds.condition) - np.array(seeds.baseline), level=level)
    return FewSeeds(interval=interval, level=level, is_of_examples=False) if interval else None
