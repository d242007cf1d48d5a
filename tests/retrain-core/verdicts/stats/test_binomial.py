"""Limits of shares and of the chance that another seed is better: scipy as referee, exact coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.verdicts.stats.binomial import (
    binomial_limits,
    held_out_limits,
    improvement_in_pairs,
    improvement_of_all_pairs,
    training_limits,
)
from retrain.verdicts.stats.paired import t_interval

VALUES = st.lists(st.integers(-5, 5), min_size=1, max_size=9).map(lambda values: np.array(values, dtype=float))
RATES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8)


@settings(max_examples=40)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95]))
def test_the_limits_are_scipys(counts: tuple[int, int], level: float) -> None:
    right, total = counts
    want = stats.binomtest(right, total).proportion_ci(level, method="exact")
    assert binomial_limits(right, total, level=level) == pytest.approx((want.low, want.high), abs=1e-9)


@settings(max_examples=25)
@given(st.sampled_from([8, 64]), st.floats(0.0005, 0.9995))
def test_they_cover_at_least_as_often_as_they_say(total: int, chance: float) -> None:
    """Exactly: the probabilities of all counts whose limits hold the chance."""
    covers = [low <= chance <= high for low, high in (binomial_limits(k, total) for k in range(total + 1))]
    assert stats.binom.pmf(np.arange(total + 1), total, chance)[covers].sum() >= 0.95


def test_all_of_sixty_four_is_not_certain() -> None:
    assert binomial_limits(64, 64) == (pytest.approx(0.025 ** (1 / 64)), 1.0)
    assert binomial_limits(0, 64) == (0.0, pytest.approx(1 - 0.025 ** (1 / 64)))
    assert held_out_limits(np.ones(8), 64) == binomial_limits(64, 64)  # eight seeds, but the same examples
    assert training_limits(np.ones(8), 8) == binomial_limits(64, 64)  # eight seeds with eight prompts of their own


def test_what_is_partly_right_only_widens() -> None:
    low, high = binomial_limits(62.5, 64)
    assert (low, high) == (binomial_limits(62, 64)[0], binomial_limits(63, 64)[1])
    assert binomial_limits(0.1 * 3 * 10, 10) == binomial_limits(3, 10)  # 3.0000000000000004


@settings(max_examples=30)
@given(RATES, st.integers(1, 500))
def test_held_out_limits_hold_both_and_stay_in_range(rates: list[float], examples: int) -> None:
    rates_N = np.array(rates)
    low, high = held_out_limits(rates_N, examples)
    exact = binomial_limits(float(rates_N.mean()) * examples, examples)
    over_seeds = t_interval(rates_N) or exact
    assert 0.0 <= low <= min(exact[0], max(over_seeds[0], 0.0)) + 1e-12
    assert 1.0 >= high >= max(exact[1], min(over_seeds[1], 1.0)) - 1e-12
    assert low < high
    if len(rates) == 1:
        assert (low, high) == pytest.approx(exact)


@settings(max_examples=30)
@given(RATES, st.integers(1, 64))
def test_training_limits_are_students_within_range(rates: list[float], prompts: int) -> None:
    rates_N = np.array(rates)
    found, by_t = training_limits(rates_N, prompts), t_interval(rates_N)
    if by_t is None:
        assert found is None
        return
    assert found is not None
    assert 0.0 <= found[0] < found[1] <= 1.0
    if np.ptp(rates_N) > 1e-9:
        assert found == pytest.approx((max(0.0, by_t[0]), min(1.0, by_t[1])))


@pytest.mark.parametrize(("right", "total"), [(0, 0), (-1, 5), (6, 5), (math.nan, 5)])
def test_what_is_no_share_is_refused(right: float, total: int) -> None:
    with pytest.raises(ValueError, match="trials"):
        binomial_limits(right, total)
    for of_seeds in (lambda none: held_out_limits(none, 64), improvement_in_pairs):
        with pytest.raises(ValueError, match="trials"):
            of_seeds(np.zeros(0))


@settings(max_examples=15)
@given(VALUES)
def test_pairs_have_scipys_exact_limits(diffs_N: np.ndarray) -> None:
    """Ties are wins in the upper limit and losses in the lower one: the interval of either reading is inside."""
    found = improvement_in_pairs(diffs_N)
    wins, ties = int((diffs_N > 0).sum()), int((diffs_N == 0).sum())
    assert found.probability == (wins + ties / 2) / diffs_N.size
    low, high = (stats.binomtest(count, diffs_N.size).proportion_ci(0.95) for count in (wins, wins + ties))
    assert found.interval == pytest.approx((low.low, high.high))


@settings(max_examples=15)
@given(VALUES, VALUES)
def test_all_pairs_are_the_mann_whitney_statistic(baseline_N: np.ndarray, condition_M: np.ndarray) -> None:
    found = improvement_of_all_pairs(baseline_N, condition_M)
    u = stats.mannwhitneyu(condition_M, baseline_N, alternative="greater").statistic
    assert found.probability == pytest.approx(u / (baseline_N.size * condition_M.size))
    low, high = found.interval
    assert 0.0 <= low <= found.probability <= high <= 1.0
    turned = improvement_of_all_pairs(condition_M, baseline_N)
    assert turned.interval == pytest.approx((1.0 - high, 1.0 - low), abs=1e-6)


def test_seeds_that_all_agree_are_no_certainty() -> None:
    """A bootstrap says [1, 1] here."""
    pairs, all_pairs = improvement_in_pairs(np.ones(8)), improvement_of_all_pairs(np.zeros(8), np.ones(8))
    assert pairs.interval == pytest.approx((0.025 ** (1 / 8), 1.0))
    assert all_pairs.interval == (pytest.approx(0.76, abs=0.02), 1.0)
