"""One condition against its baseline: the verdict on the mean of the differences and its grounds, seed by seed too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.curves import Direction, Metric
from retrain.verdicts.stats.binomial import Improvement, improvement_in_pairs, improvement_of_all_pairs
from retrain.verdicts.stats.components import Advice, Components


class DecidingTest(Protocol):
    @property
    def p(self) -> float:
        """Two-sided p value, before Holm's correction."""

    @property
    def smallest_p(self) -> float:
        """The least possible p with as many seeds."""

    def interval(self, level: float) -> tuple[float, float]:
        """Return an interval of the mean difference that leaves out zero exactly where p <= 1 - level."""


class Design(StrEnum):
    """The kind of test that decides."""

    FIXED = "fixed"
    UNPAIRED = "unpaired"
    PLANNED = "planned looks"
    ANYTIME = "anytime"


@dataclass(frozen=True, slots=True, kw_only=True)
class LooksView:
    """The looks taken at one comparison, and the test that allows for them.

    With planned looks: `planned` and `taken` are numbers of seeds, `decided_after` the look of the verdict. With
    `anytime`: `taken` are the earlier looks on record, and `reason` names the departure from the plan.
    """

    design: Design
    reason: str = ""
    planned: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    spend: str | None = None
    decided_after: int | None = None

    @property
    def next_look(self) -> int | None:
        return next((look for look in self.planned if look > max(self.taken, default=0)), None)


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    PRACTICALLY_SAME = "practically the same"  # only with a planned margin
    CANNOT_TELL = "cannot tell"


class VerdictReason(StrEnum):
    FOUND = "found"
    TOO_FEW = "too few seeds"  # with this many seeds no data could give another verdict
    NOT_SIGNIFICANT = "not significant"
    WITHIN = "within the margin"
    FOUND_WITHIN = "found, but within the margin"
    NOT_BEYOND_CONTROL = "not better than its controls"  # it beats its baseline, but not all of its controls


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The second line of a comparison, with lost runs at `worst`; it `survives` with the verdict of the first line."""

    baseline_seeds: tuple[int, ...]
    condition_seeds: tuple[int, ...]
    worst: float
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    level: float
    p_holm: float | None
    verdict: Verdict
    survives: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """A condition against one of its controls, over their common seeds, by the deciding test without correction.

    Numbers are None without data, as with a control that has no finished run. `is_beaten`: the condition is on the
    better side, with p at most alpha.
    """

    control: str
    label: str
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    is_beaten: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlsView:
    """All controls of one condition. `p_holm` decides about "better": see `with_controls`."""

    results: tuple[ControlResult, ...]
    p_holm: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSeeds:
    """An estimate that decides nothing, if seeds are roughly normal; about new examples too if `is_of_examples`."""

    interval: tuple[float, float]
    level: float
    is_of_examples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesView:
    """A difference over new seeds and new examples of the same kind, by crossed random effects; see `stats.crossed`.

    `interval` is at `level`, and never narrower than the distribution-free one over seeds; nor is `p`
    smaller. `normal` is the interval at 1 - alpha by crossed effects only. With clusters, `num_clusters` <
    `num_examples`, new examples means new clusters. `advice` exists while the interval holds zero. With a `reason`
    there is no such view: everything else is None or 0; `are_others` if both sides have different examples.
    """

    reason: str = ""
    are_others: bool = False
    num_seeds: int = 0
    num_examples: int = 0
    num_clusters: int = 0
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    level: float | None = None
    normal: tuple[float, float] | None = None
    p: float | None = None
    components: Components | None = None
    advice: Advice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A main effect or, with two `levels`, an interaction: mixtures of a factorial's conditions by their labels.

    `levels` and the baseline's `reference` are by factor; the effect is averaged over the levels of the factors `over`.
    """

    baseline: str
    condition: str
    levels: Mapping[str, str]
    reference: Mapping[str, str]
    over: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict on one pairing; numbers that cannot be computed are None.

    `difference` is condition minus baseline and `interval` its interval at `level`, infinite where seeds are too few:
    that level belongs to the comparison's step of Holm's correction, so the interval leaves out zero exactly where the
    verdict is better or worse. `p_holm` is the corrected p that decides, `smallest_p` the least p with these seeds.
    `detectable` is the true difference found in 80 % of studies like this one, at
    `alpha / comparisons`; `least_seeds` are the fewest for any verdict.
    Within the planned `margin` both are practically the same. `effect` exists in a factorial, `lost` if runs were lost,
    `few_seeds` if three seeds or more are too few for a verdict.
    """

    baseline: str
    condition: str
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    level: float
    p: float | None
    p_holm: float | None
    smallest_p: float
    d_z: float | None
    d_pooled: float | None
    detectable: float | None
    least_seeds: int
    verdict: Verdict
    cause: VerdictReason
    alpha: float
    num_comparisons: int
    margin: float | None = None
    per_seed: PerSeed | None = None
    lost: Lost | None = None
    controls: ControlsView | None = None
    looks: LooksView | None = None
    examples: ExamplesView | None = None
    few_seeds: FewSeeds | None = None
    effect: Effect | None = None


# A smaller gap is no collapse, however close together the other seeds are: 5 pp are three of 64 examples.
LEAST_GAP_OF_A_RATE = 0.05
Values = Mapping[int, float]  # of one condition, by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSeed:
    """The values behind a comparison, in the order of its `seeds`.

    The worst values are over all compared seeds of a side. `wins` and `ties` count common seeds; `in_pairs` is their
    share with exact binomial limits, `of_all_pairs` the "probability of improvement" of arXiv:2108.13264.
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
    """Seeds of a condition far on the worse side of its others; `median` is over all its seeds."""

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
    return PerSeed(
        baseline=tuple(left_N.tolist()),
        condition=tuple(right_N.tolist()),
        worst_baseline=worst(baseline.values()),
        worst_condition=worst(condition.values()),
        wins=int(np.sum(better_N > 0)),
        ties=int(np.sum(better_N == 0)),
        in_pairs=improvement_in_pairs(better_N),
        of_all_pairs=improvement_of_all_pairs(sign * all_left, sign * all_right),
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


# In robust standard deviations: among normal values one in three million lies that far below.
FAR = 5.0
# With three values, one always looks like an outlier.
LEAST_SEEDS = 4
# The median absolute deviation of a normal law is its standard deviation over 1.4826.
_NORMAL = 1.4826
_ROUNDING = 1e-9


def collapsed(values_by_condition: Sequence[Floats], *, least_gap: float = 0.0) -> list[list[int]]:
    """Return, per condition, the indices of values that lie far below its median.

    Far is both `FAR` robust standard deviations and `least_gap`. The robust standard deviation is 1.4826 times the
    median absolute deviation from the median, the larger of the condition's and that over all conditions, each around
    its own median: neither a handful of close seeds nor a condition that spreads by nature raises a flag. A condition
    with fewer than four values gets no flag. Turn the sign of the values where lower is better.
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
