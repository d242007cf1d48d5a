"""The chance that another seed is better: scipy as referee, and what few seeds must not pretend to know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.verdicts.stats.binomial import improvement_in_pairs, improvement_of_all_pairs

VALUES = st.lists(st.integers(-5, 5), min_size=1, max_size=9).map(lambda values: np.array(values, dtype=float))


@settings(max_examples=12)
@given(VALUES)
def test_pairs_have_scipys_exact_limits(diffs_N: np.ndarray) -> None:
    """Ties are wins in the upper limit and losses in the lower one: the interval of either reading is inside."""
    found = improvement_in_pairs(diffs_N)
    assert found is not None
    wins, ties = int((diffs_N > 0).sum()), int((diffs_N == 0).sum())
    assert found.probability == (wins + ties / 2) / diffs_N.size
    low, high = (stats.binomtest(count, diffs_N.size).proportion_ci(0.95) for count in (wins, wins + ties))
    assert found.interval == pytest.approx((low.low, high.high))


@settings(max_examples=12)
@given(VALUES, VALUES)
def test_all_pairs_are_the_mann_whitney_statistic(baseline_N: np.ndarray, condition_M: np.ndarray) -> None:
    found = improvement_of_all_pairs(baseline_N, condition_M)
    assert found is not None
    u = stats.mannwhitneyu(condition_M, baseline_N, alternative="greater").statistic
    assert found.probability == pytest.approx(u / (baseline_N.size * condition_M.size))
    low, high = found.interval
    assert 0.0 <= low <= found.probability <= high <= 1.0
    turned = improvement_of_all_pairs(condition_M, baseline_N)
    assert turned is not None
    assert turned.interval == pytest.approx((1.0 - high, 1.0 - low), abs=1e-6)


def test_seeds_that_all_agree_are_no_certainty() -> None:
    """A bootstrap says [1, 1] here."""
    pairs = improvement_in_pairs(np.ones(8))
    all_pairs = improvement_of_all_pairs(np.zeros(8), np.ones(8))
    assert pairs is not None
    assert all_pairs is not None
    assert pairs.interval == pytest.approx((0.025 ** (1 / 8), 1.0))
    assert all_pairs.interval[0] == pytest.approx(0.76, abs=0.02)
    assert all_pairs.interval[1] == 1.0


def test_without_seeds_there_is_nothing_to_say() -> None:
    assert improvement_in_pairs(np.zeros(0)) is None
    assert improvement_of_all_pairs(np.zeros(0), np.ones(3)) is None
