"""Tests, intervals and power against scipy called directly, and against simulated studies."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.records.runs.curves import Direction
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats import paired as power
from retrain.verdicts.stats.flip import FlipTest, patterns_for
from retrain.verdicts.stats.sequential import inverted
from retrain.verdicts.study.comparison import Verdict, VerdictReason
from retrain.verdicts.study.judge import holm, judge, levels
from retrain.verdicts.study.study import Options, study_of
from tests.kit.made_runs import write_campaign
from tests.kit.pairings import pairing

ALPHA = 0.05


def mean(x, axis=-1):
    return x.mean(axis=axis)


def scipy_p(diffs_N):
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": 9_999}
    return float(stats.permutation_test((diffs_N,), mean, **options, rng=np.random.default_rng(5)).pvalue)


def judged(*diffs, alpha=ALPHA, direction=Direction.HIGHER):
    return judge([pairing(each) for each in diffs], alpha=alpha, direction=direction)


def scipy_power(num_seeds, d, alpha):
    critical, shift = stats.t.ppf(1 - alpha / 2, num_seeds - 1), d * math.sqrt(num_seeds)
    below = stats.nct.cdf(-critical, num_seeds - 1, shift)  # NaN far out, where it is nothing
    return float(stats.nct.sf(critical, num_seeds - 1, shift) + np.nan_to_num(below))


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.integers(2, 15), st.integers(1, 3), st.floats(-1.0, 1.0))
def test_the_numbers_of_a_comparison_are_scipys(seed, num_seeds, comparisons, effect):
    a_N, *others = np.random.default_rng(seed).normal(0.0, 1.0, (1 + comparisons, num_seeds))
    found = judge([pairing(each + effect, a_N) for each in others], alpha=ALPHA, direction=Direction.HIGHER)
    for each, b_N in zip(found, [each + effect for each in others], strict=True):
        diffs_N, least = b_N - a_N, 1e-9 if num_seeds <= 13 else 0.05
        assert each.p == pytest.approx(scipy_p(diffs_N), abs=least)
        assert each.difference == pytest.approx(stats.ttest_rel(b_N, a_N).statistic * stats.sem(diffs_N))
        assert each.d_z == pytest.approx(diffs_N.mean() / diffs_N.std(ddof=1))
        assert each.d_pooled == pytest.approx(diffs_N.mean() / math.sqrt((a_N.var(ddof=1) + b_N.var(ddof=1)) / 2))
        assert (each.detectable is None) == (num_seeds < each.least_seeds)
        if each.detectable is not None:
            d, alpha = each.detectable / diffs_N.std(ddof=1), ALPHA / comparisons
            assert power.power_of(num_seeds, d, alpha) == pytest.approx(0.8, abs=1e-4)
            assert scipy_power(num_seeds, d, alpha) >= 0.8 - 1e-4
    assert [each.p_holm for each in found] == pytest.approx(holm([each.p or 0.0 for each in found]))


def test_the_intervals_of_conditions_hold_students_and_of_held_out_rates_the_exact_ones(tmp_path):
    write_campaign(tmp_path, {"grpo+none": 0.0, "maxrl+none": 0.1}, seeds=range(4), steps=4, spread=0.1, eval_every=2)
    for condition in study_of(find_runs([tmp_path]), Options()).conditions:
        for name, estimate in condition.estimates.items():
            values_N = np.array(list(estimate.values.values()))
            mean = values_N.mean()
            assert estimate.mean == pytest.approx(mean)
            if np.ptp(values_N) == 0.0:
                continue
            low, high = stats.t.interval(0.95, values_N.size - 1, mean, stats.sem(values_N))
            if name.startswith("eval_"):
                right = mean * 64  # the examples of made-up runs
                least = stats.binomtest(math.floor(right + 1e-9), 64).proportion_ci(method="exact").low
                most = stats.binomtest(math.ceil(right - 1e-9), 64).proportion_ci(method="exact").high
                low, high = mean - math.hypot(mean - low, mean - least), mean + math.hypot(mean - high, mean - most)
            assert estimate.interval == pytest.approx(tuple(np.clip((low, high), 0.0, 1.0)))


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_its_definition(p_M):
    adjusted = holm(p_M)
    for alpha in (0.01, 0.05, 0.2, 0.5):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_M)), key=lambda i: p_M[i])):
            if (len(p_M) - rank) * p_M[index] > alpha:
                break
            rejected.add(index)
        assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected
    assert all(p <= q <= 1.0 for p, q in zip(p_M, adjusted, strict=True))


@pytest.mark.parametrize(("comparisons", "least"), [(1, 6), (4, 8)])
def test_too_few_seeds_cannot_tell_whatever_they_show(comparisons, least):
    for num_seeds in (3, least - 1, least):
        for found in judged(*[np.arange(10.0, 10.0 + num_seeds)] * comparisons):
            p, is_enough = 2 / 2**num_seeds, num_seeds == least
            assert (found.p, found.smallest_p, found.least_seeds) == (p, p, least)
            assert (found.verdict is Verdict.BETTER) == is_enough == (found.cause is not VerdictReason.TOO_FEW)
            assert (found.detectable is None) == (not is_enough)


def test_untested_comparisons_count_and_directions_turn_verdicts():
    clear = np.arange(10.0, 16.0)
    found, empty, single = judged(clear, [], [1.0])
    assert (found.p_holm, found.verdict, found.cause) == (0.03125 * 3, Verdict.CANNOT_TELL, VerdictReason.TOO_FEW)
    for none in (empty, single):
        assert (none.p, none.p_holm, none.interval, none.d_z, none.verdict) == (None,) * 4 + (Verdict.CANNOT_TELL,)
    assert (empty.difference, single.difference) == (None, 1.0)
    up, down = np.arange(10.0, 18.0), -np.arange(10.0, 18.0)
    assert [each.verdict for each in judged(up, down)] == [Verdict.BETTER, Verdict.WORSE]
    assert [each.verdict for each in judged(up, down, direction=Direction.LOWER)] == [Verdict.WORSE, Verdict.BETTER]
    same, shifted = judged(np.zeros(8), np.full(8, 0.25))
    assert (same.p, same.verdict, same.interval) == (1.0, Verdict.CANNOT_TELL, (0.0, 0.0))
    assert (same.d_z, same.smallest_p) == (None, 1.0)
    assert (shifted.verdict, shifted.interval, shifted.d_z) == (Verdict.BETTER, (0.25, 0.25), None)


@example(scale=140596.48828035058, diffs=[-2, -17, -7, -20, -17, -12, 16, -17, -8])
@settings(max_examples=50)
@given(
    scale=st.floats(1e-6, 1e6),
    diffs=st.lists(st.integers(-20, 20), min_size=6, max_size=10).filter(lambda d: len(set(d)) > 1),
)
def test_units_do_not_matter(scale, diffs):
    [one], [other] = judged(diffs), judged(np.array(diffs) * scale)
    assert (one.p, one.verdict) == (other.p, other.verdict)


def test_power_is_scipys_and_drawn_patterns_are_enough():
    for num_seeds, d, alpha in product((8, 10, 20, 100), (0.2, 0.5, 1.0), (0.05,)):
        assert power.power_of(num_seeds, d, alpha) == pytest.approx(scipy_power(num_seeds, d, alpha))
    assert power.power_of(6, 1.5, 0.05) == pytest.approx(float(stats.norm.cdf(1.5) ** 6), abs=1e-6)
    assert power.power_of(5, 10.0, 0.05) == 0.0
    assert power.power_of(50, 100.0, 0.05) == 1.0
    assert [power.least_seeds(alpha) for alpha in (0.05, 0.05 / 4, 0.05 / 3, 0.5)] == [6, 8, 7, 2]
    assert [patterns_for(each, 0.05) for each in (1, 4, 100, 10_000)] == [10_000, 10_000, 40_000, 200_000]
    for comparisons in (100, 500):
        test = FlipTest.of(np.arange(1.0, 17.0), patterns=patterns_for(comparisons, 0.05))
        assert comparisons * test.smallest_p <= 0.05 / 2


DIFFS = st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), st.integers(0, 2**16))


@settings(max_examples=50)
@given(family=st.lists(DIFFS, min_size=1, max_size=20), alpha=st.sampled_from([0.05, 0.1, 0.01, 0.25]))
def test_an_interval_leaves_out_zero_exactly_where_its_verdict_is_found(family, alpha):
    diffs = [np.random.default_rng(key).normal(effect, 1.0, size).round(1) for size, effect, key in family]
    for found in judged(*diffs, alpha=alpha):
        low, high = found.interval or (-math.inf, math.inf)
        assert (found.cause is VerdictReason.FOUND) == (low > 0.0 or high < 0.0)
        assert (found.verdict is Verdict.BETTER) == (low > 0.0)
        assert (found.verdict is Verdict.WORSE) == (high < 0.0)
        assert 1.0 - alpha - 1e-12 <= found.level <= 1.0 - alpha / len(diffs) + 1e-12


@pytest.mark.parametrize("reach", [0.5, 3.0, 50.0, 1e4, math.inf])
def test_limits_are_found_however_far_outside_the_data(reach):
    diffs_N = np.array([0.1, 0.4, 0.2])
    mean = float(diffs_N.mean())
    found = inverted(diffs_N, is_rejected=lambda shift: abs(shift - mean) > reach, is_zero_rejected=False)
    assert found == pytest.approx((mean - reach, mean + reach), rel=1e-6)
    assert inverted(diffs_N[:0], is_rejected=bool, is_zero_rejected=False) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("diffs", "far"),
    [([0.1, 0.4, 0.2], 4e5), ([-0.4, -0.1], 4e5), ([-0.3, 0.4], 7e5), ([0.0], 2.2250738585e-302)],
)
def test_a_limit_is_a_million_ranges_away_or_infinite(diffs, far):
    for factor, limit in ((0.99, 0.99 * far), (1.01, math.inf)):
        bound = factor * far
        found = inverted(np.array(diffs), is_rejected=lambda shift: abs(shift) > bound, is_zero_rejected=False)  # noqa: B023
        assert found == pytest.approx((-limit, limit), rel=0.01, abs=0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_rejected_zero_bounds_the_interval_on_its_side_of_the_mean(sign):
    diffs_N = sign * np.array([0.1, 0.4, 0.25])

    def limits(reach, *, is_zero_rejected):
        is_rejected = lambda shift: abs(shift - diffs_N.mean()) > reach  # noqa: E731
        found = inverted(diffs_N, is_rejected=is_rejected, is_zero_rejected=is_zero_rejected)
        return tuple(sorted(sign * each for each in found))

    assert limits(0.1, is_zero_rejected=True) == pytest.approx((0.15, 0.35))
    assert limits(0.1, is_zero_rejected=False) == pytest.approx((0.0, 0.35), abs=1e-5)
    assert limits(0.5, is_zero_rejected=False) == pytest.approx((-0.25, 0.75))
    low, high = limits(0.5, is_zero_rejected=True)
    assert 0.0 < low < 1e-8
    assert high == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("p_M", "shares"),
    [
        ([0.001, 0.5, 0.012], [3, 1, 2]),  # two found, the third fails at the last step
        ([0.5, 0.03, 0.2], [3, 3, 3]),  # none found: all fail at the first step
        ([0.5, 0.001, 0.2], [2, 3, 2]),
        ([0.01, 0.01, 0.01], [3, 2, 1]),
        ([0.05], [1]),
    ],
)
def test_levels_are_those_of_holms_steps(p_M, shares):
    assert levels(p_M, alpha=0.05) == pytest.approx([1.0 - 0.05 / share for share in shares])
