"""Limits of shares: against scipy's exact ones and exact coverage; never outside of [0, 1], never falsely certain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.verdicts.stats.binomial import binomial_limits, held_out_limits, training_limits
from retrain.verdicts.stats.paired import t_interval

RATES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8)


@settings(max_examples=60)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95]))
def test_the_limits_are_scipys(counts: tuple[int, int], level: float) -> None:
    right, total = counts
    want = stats.binomtest(right, total).proportion_ci(level, method="exact")
    assert binomial_limits(right, total, level=level) == pytest.approx((want.low, want.high), abs=1e-9)


@pytest.mark.parametrize("total", [8, 64])
@pytest.mark.parametrize("chance", [0.001, 0.02, 0.3, 0.5, 0.95, 0.999])
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


@settings(max_examples=50)
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


@settings(max_examples=50)
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
    with pytest.raises(ValueError, match="trials"):
        held_out_limits(np.array([]), 64)
