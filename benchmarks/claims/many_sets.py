"""Several evaluation sets: what bootstrap intervals of few runs cover, and the verdicts over sets x conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Direction, Metric
from retrain.verdicts.stats.flip import FlipTest
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.judge import Pairing, judge
from retrain.verdicts.study.sets import bootstrap, interquartile_mean, sets_view

ALPHA, RESAMPLES = 0.05, 500
LEVELS_M = np.array([0.3, 0.4, 0.5, 0.6, 0.7])  # mean scores of the sets
SPREAD = 0.04  # of a score over seeds
SHARED = (0.0, 0.5)  # share of the variance over seeds that all sets have in common
SEED_COUNTS = (6, 8, 12)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], shared: float) -> np.ndarray:
    """Scores of (..., seeds) runs on all sets, normal."""
    common = rng.normal(0.0, SPREAD * np.sqrt(shared), (*shape, 1))
    return LEVELS_M + common + rng.normal(0.0, SPREAD * np.sqrt(1.0 - shared), (*shape, LEVELS_M.size))


def mean_score(scores_NM: np.ndarray) -> np.ndarray:
    """The mean over sets of the mean over runs."""
    return np.asarray(scores_NM.mean(axis=(-2, -1)))


def coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Coverage of 95 % intervals: whole runs drawn, runs drawn per set (rliable), and flips of per-seed means."""
    for shared in SHARED:
        for num_seeds in SEED_COUNTS:
            rng = seeds.stream("sets", str(shared), num_seeds)
            runs_SNM = drawn(rng, (simulations, num_seeds), shared)
            where = f"5 sets, {num_seeds} seeds, {100 * shared:.0f} % of the variance shared"
            reference_NM = drawn(rng, (5_000, num_seeds), shared)
            for name, statistic in (("mean", mean_score), ("IQM", interquartile_mean)):
                true = float(statistic(reference_NM).mean())
                for is_stratified in (False, True):
                    how = "runs drawn per set" if is_stratified else "whole runs drawn"
                    covers = []
                    for scores_NM in runs_SNM:
                        low, high = bootstrap(
                            scores_NM, statistic, rng, resamples=RESAMPLES, is_stratified=is_stratified
                        )
                        covers.append(low <= true <= high)
                    yield share(f"bootstrap of the {name} covers, {how}, {where}", np.array(covers))
            diffs_SN = (runs_SNM - drawn(rng, (simulations, num_seeds), shared)).mean(axis=2)
            limits_S2 = np.array([FlipTest.of(diffs_N).interval(0.95) for diffs_N in diffs_SN])
            covers_S = (limits_S2[:, 0] <= 0.0) & (limits_S2[:, 1] >= 0.0)
            yield share(f"flip interval of the difference of means covers, {where}", covers_S, at_least=0.94)


def false_verdicts(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """No difference on any set: any verdict in the family of sets x conditions."""
    metrics = {f"s{index}": Metric(f"eval_s{index}_correct_rate") for index in range(LEVELS_M.size)}
    judged = partial(judge, alpha=ALPHA, direction=Direction.HIGHER)
    for conditions, num_seeds in ((2, 10), (5, 12)):
        labels = [f"c{index}" for index in range(conditions)]
        rng = seeds.stream("sets family", conditions)
        any_verdict = []
        for _ in range(simulations):
            scores_CNM = drawn(rng, (conditions, num_seeds), 0.5)
            values_of = _values_of(labels, list(metrics.values()), scores_CNM)
            pairings = [_pairing(label) for label in labels[1:]]
            view = sets_view(metrics, labels, pairings, values_of=values_of, judged=judged)
            family = [each for pair in view.comparisons for each in (pair.overall, *pair.per_set)]
            any_verdict.append(any(each.verdict is not Verdict.CANNOT_TELL for each in family))
        what = f"any false verdict over 5 sets and their mean, {conditions} conditions, {num_seeds} seeds"
        yield share(what, np.array(any_verdict), at_most=0.055)


def _pairing(label: str) -> Pairing:
    return Pairing(baseline="c0", condition=label, seeds=(), baseline_N=np.zeros(0), condition_N=np.zeros(0))


def _values_of(
    labels: Sequence[str], metrics: Sequence[Metric], scores_CNM: np.ndarray
) -> Callable[[str, Metric], Mapping[int, float]]:
    return lambda label, metric: dict(enumerate(scores_CNM[labels.index(label), :, metrics.index(metric)].tolist()))


CLAIMS: Mapping[str, Claim] = {"sets-coverage": coverage, "sets-family": false_verdicts}
