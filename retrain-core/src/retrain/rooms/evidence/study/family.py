"""Judges comparisons together: Holm's correction, the power of this many seeds, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from retrain.kernel.types import Floats
from retrain.rooms.evidence.stats import paired, power
from retrain.rooms.evidence.study.deciding import DecidingTest
from retrain.rooms.evidence.study.metric import Direction
from retrain.rooms.evidence.study.per_seed import PerSeed


class Verdict(StrEnum):
    """A condition against its baseline."""

    BETTER = "better"
    WORSE = "worse"
    PRACTICALLY_SAME = "practically the same"  # only with a planned margin
    CANNOT_TELL = "cannot tell"


class VerdictReason(StrEnum):
    """Reason for a verdict."""

    FOUND = "found"
    TOO_FEW = "too few seeds"  # with this many seeds no data could give another verdict
    NOT_SIGNIFICANT = "not significant"
    DISAGREE = "test and interval disagree"
    WITHIN = "within the margin"
    FOUND_WITHIN = "found, but within the margin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fisher:
    """Fisher's exact test on held-out counts, all seeds together. Completions of one prompt are not independent, nor
    are those of one run: p is far too small. It is shown because readers expect it, but never used.
    """

    right_baseline: int
    total_baseline: int
    right: int
    total: int
    p: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairing:
    """A baseline and a condition over their common seeds, one value per seed each, in the order of `seeds`.

    `test_of` makes the test that decides, of the seeds and their differences; None for the sign-flip test of a fixed
    number of seeds. It is made anew for other values of the same pair (`replace`), lost seeds at the worst value, say.
    """

    baseline: str
    condition: str
    seeds: tuple[int, ...]
    baseline_N: Floats
    condition_N: Floats
    fisher: Fisher | None = None
    test_of: Callable[[Sequence[int], Floats], DecidingTest] | None = None

    @property
    def diffs_N(self) -> Floats:
        """Condition minus baseline, per seed."""
        return self.condition_N - self.baseline_N

    @property
    def test(self) -> DecidingTest | None:
        """The test that decides; None for the sign-flip test of a fixed number of seeds."""
        return self.test_of(self.seeds, self.diffs_N) if self.test_of else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The second line of a comparison, with lost runs at `worst`: the same test over the seeds that this completes.

    `survives` says whether its verdict is that of the first line.
    """

    baseline_seeds: tuple[int, ...]
    condition_seeds: tuple[int, ...]
    worst: float
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    p_holm: float | None
    verdict: Verdict
    survives: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict on one pairing; numbers that cannot be computed are None.

    `difference` is condition minus baseline with its bootstrap interval, `p_holm` the corrected p that decides,
    `smallest_p` what p could be at best with these seeds. `detectable` is the true difference found in 80 % of studies
    like this one, `seeds_needed` how many seeds the observed difference needs for that, both at `alpha / comparisons`.
    `least_seeds` is how many seeds it takes for any verdict at all. `margin` is the planned one, within which both
    are practically the same; `lost` the line with lost runs at the worst value, None if there are none.
    """

    baseline: str
    condition: str
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    p_holm: float | None
    smallest_p: float
    d_z: float | None
    d_pooled: float | None
    detectable: float | None
    seeds_needed: int | None
    least_seeds: int
    fisher: Fisher | None
    verdict: Verdict
    cause: VerdictReason
    alpha: float
    num_comparisons: int
    margin: float | None = None
    per_seed: PerSeed | None = None
    lost: Lost | None = None

    @property
    def more_seeds(self) -> int | None:
        """Seeds to add to find the observed difference, if it is the true one."""
        return None if self.seeds_needed is None else max(0, self.seeds_needed - len(self.seeds))


def judge(pairings: Sequence[Pairing], *, alpha: float, direction: Direction) -> tuple[Comparison, ...]:
    """Every pairing, with the chance of any false verdict over all of them at most `alpha`.

    better / worse needs both: a sign-flip p of at most alpha after Holm's correction over all pairings, those that
    could not be tested included, and a bootstrap interval (level 1 - alpha) on the same side of zero.
    """
    resamples = paired.resamples_for(len(pairings), alpha)
    p_M = [_p(each, resamples) for each in pairings]
    known_M = [1.0 if p is None else p for p in p_M]
    holm_M = holm(known_M)
    judged = []
    for index, (pairing, p) in enumerate(zip(pairings, p_M, strict=True)):
        differing = int(np.count_nonzero(pairing.diffs_N))
        smallest = pairing.test.smallest_p if pairing.test else paired.smallest_p(differing, resamples=resamples)
        at_best = holm([*known_M[:index], smallest, *known_M[index + 1 :]])[index]
        judged.append(
            _judged(
                pairing,
                p=p,
                p_holm=None if p is None else holm_M[index],
                smallest=smallest,
                can_decide=p is not None and at_best <= alpha,
                alpha=alpha,
                comparisons=len(pairings),
                direction=direction,
            )
        )
    return tuple(judged)


def _p(pairing: Pairing, resamples: int) -> float | None:
    if len(pairing.seeds) < 2:
        return None
    return pairing.test.p if pairing.test else paired.sign_flip_p(pairing.diffs_N, resamples=resamples)


def holm(p_M: Sequence[float]) -> list[float]:
    """p values corrected so that the chance of any false rejection stays below alpha (Holm 1979), in the given order.

    The i-th smallest of m becomes the running maximum of (m - i + 1) p, at most 1.
    """
    adjusted, before = [1.0] * len(p_M), 0.0
    for rank, index in enumerate(sorted(range(len(p_M)), key=lambda i: p_M[i])):
        before = max(before, min(1.0, (len(p_M) - rank) * p_M[index]))
        adjusted[index] = before
    return adjusted


def fisher(baseline: tuple[int, int], condition: tuple[int, int]) -> Fisher:
    """The test on (right, total) of both sides."""
    from scipy.stats import fisher_exact

    table = [[right, total - right] for right, total in (condition, baseline)]
    p = float(fisher_exact(table).pvalue)
    return Fisher(right_baseline=baseline[0], total_baseline=baseline[1], right=condition[0], total=condition[1], p=p)


def _judged(
    pairing: Pairing,
    *,
    p: float | None,
    p_holm: float | None,
    smallest: float,
    can_decide: bool,
    alpha: float,
    comparisons: int,
    direction: Direction,
) -> Comparison:
    diffs_N, num_seeds = pairing.diffs_N, len(pairing.seeds)
    level = 1.0 - alpha
    interval = pairing.test.interval(level) if pairing.test else paired.bca_interval(diffs_N, level=level)
    difference = float(diffs_N.mean()) if num_seeds else None
    sd, d_z, share = paired.spread(diffs_N), paired.paired_d(diffs_N), alpha / comparisons
    detectable_d = power.detectable_d(num_seeds, share) if sd else None
    verdict, cause = _verdict(difference, interval, p_holm, can_decide=can_decide, alpha=alpha, direction=direction)
    return Comparison(
        baseline=pairing.baseline,
        condition=pairing.condition,
        seeds=pairing.seeds,
        difference=difference,
        interval=interval,
        p=p,
        p_holm=p_holm,
        smallest_p=smallest,
        d_z=d_z,
        d_pooled=paired.pooled_d(pairing.baseline_N, pairing.condition_N),
        detectable=None if detectable_d is None or sd is None else detectable_d * sd,
        seeds_needed=power.seeds_needed(d_z, share) if d_z else None,
        least_seeds=power.least_seeds(share),
        fisher=pairing.fisher,
        verdict=verdict,
        cause=cause,
        alpha=alpha,
        num_comparisons=comparisons,
    )


def _verdict(
    difference: float | None,
    interval: tuple[float, float] | None,
    p_holm: float | None,
    *,
    can_decide: bool,
    alpha: float,
    direction: Direction,
) -> tuple[Verdict, VerdictReason]:
    if p_holm is None or difference is None or not can_decide:
        return Verdict.CANNOT_TELL, VerdictReason.TOO_FEW
    if p_holm > alpha:
        return Verdict.CANNOT_TELL, VerdictReason.NOT_SIGNIFICANT
    if interval is None or not (interval[0] > 0.0 if difference > 0.0 else interval[1] < 0.0):
        return Verdict.CANNOT_TELL, VerdictReason.DISAGREE
    is_better = (difference > 0.0) == (direction is Direction.HIGHER)
    return (Verdict.BETTER if is_better else Verdict.WORSE), VerdictReason.FOUND


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """The documented JSON form."""
    found: Mapping[str, Any] = {name: getattr(comparison, name) for name in Comparison.__slots__}
    fisher_test = comparison.fisher
    return {
        **found,
        "seeds": list(comparison.seeds),
        "interval": None if comparison.interval is None else list(comparison.interval),
        "more_seeds": comparison.more_seeds,
        "fisher": fisher_test and {name: getattr(fisher_test, name) for name in Fisher.__slots__},
    }
