"""Decides "better", "worse" and "practically the same": Holm's correction over all comparisons, and the verdict.

`practically the same` is two one-sided tests (D. J. Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15:657, 1987),
each at alpha / 2 divided by the number of comparisons: the interval at 1 - alpha / m. So a difference of the margin or
more is called the same anywhere in the family in at most alpha / 2 of campaigns. The levels of Holm's steps would not
hold that: the last step has the smallest of m differences. TOST at the common 1 - 2 alpha would need fewer seeds, and
an interval that is not the one on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.curves import Direction
from retrain.verdicts.stats import paired
from retrain.verdicts.stats.flip import FlipTest, at_most, fewest_exchanged, patterns_for
from retrain.verdicts.study.comparison import Comparison, DecidingTest, FewSeeds, Values, Verdict, VerdictReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairing:
    """A baseline and a condition over their common seeds, one value per seed each, in the order of `seeds`.

    `test_of` makes the deciding test; None for the sign-flip test, or the permutation test unless `is_paired`.
    """

    baseline: str
    condition: str
    seeds: tuple[int, ...]
    baseline_N: Floats
    condition_N: Floats
    test_of: Callable[[Sequence[int], Floats], DecidingTest] | None = None
    is_paired: bool = True

    @property
    def diffs_N(self) -> Floats:
        return self.condition_N - self.baseline_N


def with_values(pairing: Pairing, baseline: Values, condition: Values) -> Pairing:
    """Return the same pair and deciding test with other values, over the seeds that both have."""
    seeds = tuple(seed for seed in baseline if seed in condition)
    baseline_N, condition_N = (np.array([side[seed] for seed in seeds], dtype=float) for side in (baseline, condition))
    return replace(pairing, seeds=seeds, baseline_N=baseline_N, condition_N=condition_N)


def judge(pairings: Sequence[Pairing], *, alpha: float, direction: Direction) -> tuple[Comparison, ...]:
    """Judge every pairing, with the chance of any false verdict over all of them at most `alpha`.

    better / worse needs a p of at most alpha after Holm's correction over all pairings, untested ones included; the
    interval, at the level of that correction, then lies on one side of zero.
    """
    patterns = patterns_for(len(pairings), alpha)
    tests = [deciding_test(each, patterns) for each in pairings]
    p_M = [1.0 if test is None else test.p for test in tests]
    holm_M, level_M = holm(p_M), levels(p_M, alpha=alpha)
    judged = []
    for index, (pairing, test) in enumerate(zip(pairings, tests, strict=True)):
        diffs_N, num_seeds, share = pairing.diffs_N, len(pairing.seeds), alpha / len(pairings)
        difference = float(diffs_N.mean()) if num_seeds else None
        smallest = 1.0 if test is None else test.smallest_p
        # The best that this comparison could reach depends on the p values of the others, by Holm's correction.
        at_best = holm([*p_M[:index], smallest, *p_M[index + 1 :]])[index]
        can_decide = at_most(at_best, alpha)
        verdict, cause = Verdict.CANNOT_TELL, VerdictReason.NOT_SIGNIFICANT if can_decide else VerdictReason.TOO_FEW
        if test is not None and difference is not None and at_most(holm_M[index], alpha):
            is_better = (difference > 0.0) == (direction is Direction.HIGHER)
            verdict, cause = (Verdict.BETTER if is_better else Verdict.WORSE), VerdictReason.FOUND
        sd = paired.spread(diffs_N)
        detectable_d = paired.detectable_d(num_seeds, share) if sd and pairing.is_paired else None
        judged.append(
            Comparison(
                baseline=pairing.baseline,
                condition=pairing.condition,
                seeds=pairing.seeds,
                difference=difference,
                interval=None if test is None else test.interval(level_M[index]),
                level=level_M[index],
                p=None if test is None else test.p,
                p_holm=None if test is None else holm_M[index],
                smallest_p=smallest,
                d_z=paired.paired_d(diffs_N),
                d_pooled=paired.pooled_d(pairing.baseline_N, pairing.condition_N),
                detectable=None if detectable_d is None or sd is None else detectable_d * sd,
                least_seeds=paired.least_seeds(share) if pairing.is_paired else fewest_exchanged(share),
                verdict=verdict,
                cause=cause,
                alpha=alpha,
                num_comparisons=len(pairings),
            )
        )
    return tuple(judged)


def deciding_test(pairing: Pairing, patterns: int) -> DecidingTest | None:
    """Return the test that decides; None below two seeds."""
    if len(pairing.seeds) < 2:
        return None
    if not pairing.is_paired:
        return FlipTest.of_exchanges(pairing.baseline_N, pairing.condition_N, patterns=patterns)
    if pairing.test_of:
        return pairing.test_of(pairing.seeds, pairing.diffs_N)
    return FlipTest.of(pairing.diffs_N, patterns=patterns)


def holm(p_M: Sequence[float]) -> list[float]:
    """Correct p values so that the chance of any false rejection stays below alpha (Holm 1979), in the given order.

    The i-th smallest of m becomes the running maximum of (m - i + 1) p, at most 1.
    """
    adjusted, before = [1.0] * len(p_M), 0.0
    for rank, index in enumerate(sorted(range(len(p_M)), key=lambda i: p_M[i])):
        before = max(before, min(1.0, (len(p_M) - rank) * p_M[index]))
        adjusted[index] = before
    return adjusted


def levels(p_M: Sequence[float], *, alpha: float) -> list[float]:
    """Return the level of each comparison's interval, in the given order, by its step of Holm's correction.

    Of m comparisons of which r are found, the i-th smallest p was compared with alpha / (m - i + 1) and found, all
    others failed at alpha / (m - r): 1 minus these are the levels.
    """
    found = [at_most(each, alpha) for each in holm(p_M)]
    level_M = [0.0] * len(p_M)
    for rank, index in enumerate(sorted(range(len(p_M)), key=lambda i: p_M[i])):
        level_M[index] = 1.0 - alpha / (len(p_M) - min(rank, sum(found)))
    return level_M


def with_margin(
    comparisons: Sequence[Comparison], pairings: Sequence[Pairing], margin: float | None
) -> tuple[Comparison, ...]:
    """Return the comparisons, `practically the same` where the interval is strictly inside (-margin, margin).

    That holds where the test finds a difference, too: it exists, and by the plan it is too small to matter. An infinite
    limit is never inside. A comparison that is the same, or without a finding, then has the interval of this test.
    """
    if margin is None:
        return tuple(comparisons)
    found = []
    for each, pairing in zip(comparisons, pairings, strict=True):
        each, level = replace(each, margin=margin), 1.0 - each.alpha / each.num_comparisons
        if test := deciding_test(pairing, patterns_for(each.num_comparisons, each.alpha)):
            interval, is_found = test.interval(level), each.verdict in (Verdict.BETTER, Verdict.WORSE)
            if all(-margin < limit < margin for limit in interval):
                cause = VerdictReason.FOUND_WITHIN if is_found else VerdictReason.WITHIN
                same = Verdict.PRACTICALLY_SAME
                each = replace(each, verdict=same, cause=cause, interval=interval, level=level)
            elif not is_found:
                each = replace(each, interval=interval, level=level)
        found.append(each)
    return tuple(found)


# Student's t of two seeds is about six times as wide as of four, too wide to say anything.
FEWEST = 3


def with_few_seeds(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons, with an estimate where three seeds or more cannot reach a verdict.

    By crossed effects of seeds and examples where every example is on record, otherwise Student's t over the seeds.
    """
    found = []
    for each in comparisons:
        seeds, level, few = each.per_seed, 1.0 - each.alpha, None
        if each.cause is VerdictReason.TOO_FEW and seeds and len(seeds.baseline) >= FEWEST:
            over_seeds = paired.t_interval(np.array(seeds.condition) - np.array(seeds.baseline), level=level)
            normal = each.examples.normal if each.examples else None
            if interval := normal or over_seeds:
                few = FewSeeds(interval=interval, level=level, is_of_examples=bool(normal))
        found.append(replace(each, few_seeds=few))
    return tuple(found)
