"""Looking while seeds come in: false verdicts, the seeds that it takes, and intervals after stopping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from claims.claim import Claim, Measured, mean, share
from retrain.kernel.seeding import Seeds
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip

ALPHA = 0.05
EVERY_SEED = tuple(range(6, 21))
CONDITIONS = 5
MOST_SEEDS = 30  # of the test without a plan
STEP_LOOKS = (8, 12, 16, 20)
SIX_LOOKS = (7, 9, 11, 13, 16, 20)


def planned(diffs_N: np.ndarray, looks: Sequence[int], spend: Spend, *, drawn: int = 9_999) -> SequentialFlip:
    """The test after all looks that these differences allow."""
    taken = [look for look in looks if look <= diffs_N.size]
    n_max = looks[-1]
    shares = [look / n_max for look in taken]
    return SequentialFlip(diffs_N=diffs_N, counts_K=taken, shares_K=shares, n_max=n_max, spend=spend, drawn=drawn)


def false_planned(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Without any effect, looks after every seed from 6 to 20."""
    for spend in Spend:
        diffs_SN = seeds.stream("false planned", spend).standard_normal((simulations, EVERY_SEED[-1]))
        found_S = np.array([planned(diffs_N, EVERY_SEED, spend).rejected_at(ALPHA) is not None for diffs_N in diffs_SN])
        yield share(f"false verdicts, a look after every seed ({spend})", found_S, at_most=0.055)
    # Without any effect Holm finds something exactly where the smallest p is at most alpha over all comparisons.
    values_SCN = seeds.stream("false planned", CONDITIONS).standard_normal((simulations, CONDITIONS, EVERY_SEED[-1]))
    level = ALPHA / (CONDITIONS - 1)
    any_S = []
    for values_CN in values_SCN:
        tests = (planned(values_N - values_CN[0], EVERY_SEED, Spend.POCOCK) for values_N in values_CN[1:])
        any_S.append(any(test.rejected_at(level) is not None for test in tests))
    yield share(f"the same, any of {CONDITIONS} conditions", np.array(any_S), at_most=0.055)


def false_anytime(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Without any effect and without a plan, a look after every seed up to 30."""
    values_SCN = seeds.stream("false anytime").standard_normal((simulations, CONDITIONS, MOST_SEEDS))
    p_SC = np.array([[AnytimeTest(diffs_N=v_N - v_CN[0]).p for v_N in v_CN[1:]] for v_CN in values_SCN])
    yield share(f"false verdicts, unplanned looks up to {MOST_SEEDS} seeds", p_SC[:, 0] <= ALPHA, at_most=0.055)
    any_S = p_SC.min(axis=1) <= ALPHA / (CONDITIONS - 1)
    yield share(f"the same, any of {CONDITIONS} conditions", any_S, at_most=0.055)


def seeds_to_a_verdict(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """At an effect of 1 standard deviation: how often found, and after how many seeds."""
    diffs_SN = 1.0 + seeds.stream("expected seeds").standard_normal((simulations, EVERY_SEED[-1]))
    for looks in (SIX_LOOKS, STEP_LOOKS):
        looks_S = [planned(diffs_N, looks, Spend.POCOCK).rejected_at(ALPHA) for diffs_N in diffs_SN]
        found_S = np.array([look is not None for look in looks_S])
        used_S = np.array([looks[-1 if look is None else look] for look in looks_S])
        after = ", ".join(map(str, looks))
        yield share(f"effect 1 found, looks after {after} seeds", found_S, at_least=0.95)
        yield mean("seeds that it took", used_S, at_most=11.5)
    more_SN = np.hstack([diffs_SN, 1.0 + seeds.stream("more seeds").standard_normal((simulations, 10))])
    found_S = np.array([AnytimeTest(diffs_N=diffs_N).p <= ALPHA for diffs_N in more_SN])
    yield share(f"effect 1 found without a plan, {MOST_SEEDS} seeds at most", found_S)


def repeated_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % intervals at the time of stopping, with four planned looks, cover the true difference."""
    for effect in (0.0, 0.5, 1.0):
        diffs_SN = effect + seeds.stream("coverage", str(effect)).standard_normal((simulations, STEP_LOOKS[-1]))
        covers_S = []
        for diffs_N in diffs_SN:
            look = planned(diffs_N, STEP_LOOKS, Spend.POCOCK, drawn=999).rejected_at(ALPHA)
            stopped = planned(diffs_N[: STEP_LOOKS[-1 if look is None else look]], STEP_LOOKS, Spend.POCOCK, drawn=999)
            low, high = stopped.interval(1.0 - ALPHA)
            covers_S.append(low <= effect <= high)
        what = f"interval after planned looks covers, effect {effect:g}"
        yield share(what, np.array(covers_S), at_least=0.95)


CLAIMS: Mapping[str, Claim] = {
    "false-planned-looks": false_planned,
    "false-anytime": false_anytime,
    "seeds-to-a-verdict": seeds_to_a_verdict,
    "repeated-coverage": repeated_coverage,
}
