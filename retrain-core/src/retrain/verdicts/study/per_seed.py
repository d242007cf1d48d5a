"""Both sides of a comparison seed by seed: the worst seed of each, how often the condition is better, collapses.

A verdict is about the mean of the differences, that of the typical seed; the worst one is shown in addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.metric import Direction, Metric
from retrain.verdicts.stats.binomial import Improvement, improvement_in_pairs, improvement_of_all_pairs

LEAST_GAP_OF_A_RATE = 0.05  # a smaller gap is no collapse, however close together the other seeds are
Values = Mapping[int, float]  # of one condition, by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSeed:
    """The values behind a comparison, in the order of its `seeds`.

    The worst value of each side is over all its compared seeds, also those that the other side lacks. `wins` and `ties`
    count common seeds; `in_pairs` is their share with exact binomial limits, `of_all_pairs` the chance that any run of
    the condition is better than any run of the baseline (the "probability of improvement" of arXiv:2108.13264).
    """

    baseline: tuple[float, ...]
    condition: tuple[float, ...]
    worst_baseline: float
    worst_condition: float
    wins: int
    ties: int
    in_pairs: Improvement
    of_all_pairs: Improvement


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """Seeds of a condition far on the worse side of its others; `median` is that of all its seeds."""

    condition: str
    seeds: tuple[int, ...]
    worst: float
    median: float


def per_seed(baseline: Values, condition: Values, *, direction: Direction) -> PerSeed | None:
    """Return the view of two conditions; None without a common seed."""
    seeds = [seed for seed in baseline if seed in condition]
    if not seeds:
        return None
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    worst = min if direction is Direction.HIGHER else max
    left_N, right_N = (np.array([values[seed] for seed in seeds]) for values in (baseline, condition))
    all_left, all_right = (np.array(list(values.values())) for values in (baseline, condition))
    better_N = sign * (right_N - left_N)
    in_pairs = improvement_in_pairs(better_N)
    of_all_pairs = improvement_of_all_pairs(sign * all_left, sign * all_right)
    if in_pairs is None or of_all_pairs is None:
        return None
    return PerSeed(
        baseline=tuple(left_N.tolist()),
        condition=tuple(right_N.tolist()),
        worst_baseline=worst(baseline.values()),
        worst_condition=worst(condition.values()),
        wins=int(np.sum(better_N > 0)),
        ties=int(np.sum(better_N == 0)),
        in_pairs=in_pairs,
        of_all_pairs=of_all_pairs,
    )


def collapses(values: Mapping[str, Values], metric: Metric, *, direction: Direction) -> tuple[Collapse, ...]:
    """Return the conditions with collapsed seeds, see `collapsed`; a rate must also be 5 pp below."""
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    arrays = [sign * np.array(list(each.values())) for each in values.values()]
    found = collapsed(arrays, least_gap=LEAST_GAP_OF_A_RATE if metric.is_rate else 0.0)
    return tuple(
        Collapse(
            condition=label,
            seeds=tuple(list(by_seed)[index] for index in indices),
            worst=sign * float(values_N.min()),
            median=sign * float(np.median(values_N)),
        )
        for (label, by_seed), values_N, indices in zip(values.items(), arrays, found, strict=True)
        if indices
    )


FAR = 5.0  # robust standard deviations
LEAST_SEEDS = 4  # of three, one is always alone
_NORMAL = 1.4826  # median absolute deviation of a normal law, in standard deviations, is 1 / 1.4826
_ROUNDING = 1e-9


def collapsed(values_by_condition: Sequence[Floats], *, least_gap: float = 0.0) -> list[list[int]]:
    """Return, per condition, the indices of values that lie far below its median.

    Far is both `FAR` robust standard deviations and `least_gap`. The robust standard deviation is 1.4826 times the
    median absolute deviation from the median, the larger of the condition's and that over all conditions, each around
    its own median: neither a handful of close seeds nor a condition that spreads by nature raises a flag. A condition
    with fewer than four values has none. Turn the sign of the values where lower is better.
    """
    gaps = [np.median(values_N) - values_N if values_N.size else values_N for values_N in values_by_condition]
    known = [gaps_N for gaps_N in gaps if gaps_N.size >= LEAST_SEEDS]
    if not known:
        return [[] for _ in gaps]
    common = float(np.median(np.abs(np.concatenate(known))))
    found: list[list[int]] = [[] for _ in gaps]
    for indices, gaps_N in zip(found, gaps, strict=True):
        if gaps_N.size >= LEAST_SEEDS:
            spread = _NORMAL * max(common, float(np.median(np.abs(gaps_N))))
            indices += np.flatnonzero(gaps_N > max(FAR * spread, least_gap, _ROUNDING)).tolist()
    return found
