"""The anytime-valid test: against an independent description, a martingale exactly, and in agreement with itself."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.verdicts.stats.sequential import AnytimeTest, running_evidence

VALUES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, allow_nan=False, width=32))


def test_agrees_with_its_description() -> None:
    diffs_N = np.random.default_rng(5).normal(0.7, 1.0, 20)
    evidence, products = [], np.ones(8)
    for n in range(1, 21):
        x = diffs_N[n - 1] / math.sqrt(np.mean(diffs_N[:n] ** 2))
        products *= [2 / (1 + math.exp(-2 * bet * x)) for bet in (0.4, 0.8, 1.6, 3.2, -0.4, -0.8, -1.6, -3.2)]
        evidence.append(products.mean())
    assert running_evidence(diffs_N) == pytest.approx(evidence, rel=1e-12)
    assert AnytimeTest(diffs_N=diffs_N).p == pytest.approx(1 / max(evidence))


def test_seven_equal_differences_suffice() -> None:
    assert running_evidence(np.full(7, 0.1))[-1] == pytest.approx(33.5, abs=0.05)
    assert [AnytimeTest(diffs_N=np.full(n, 3.0)).p <= 0.05 for n in (6, 7)] == [False, True]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.floats(0.0, 1e3, width=32), min_size=1, max_size=7))
def test_its_mean_over_all_signs_is_one(sizes: list[float]) -> None:
    ends = [running_evidence(np.array(signs) * np.array(sizes))[-1] for signs in product((1, -1), repeat=len(sizes))]
    assert np.mean(ends) == pytest.approx(1.0, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(diffs=st.lists(VALUES, min_size=1, max_size=20), alpha=st.sampled_from([0.05, 0.0125, 0.3]))
def test_interval_and_p_agree(diffs: list[float], alpha: float) -> None:
    test = AnytimeTest(diffs_N=np.array(diffs))
    low, high = test.interval(1.0 - alpha)
    assert low <= np.mean(diffs) <= high
    assert (low > 0.0 or high < 0.0) == (test.p <= alpha)
    assert test.smallest_p <= test.p * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(diffs=st.lists(VALUES, min_size=2, max_size=12), scale=st.sampled_from([1e-200, 1e-3, 1e150]))
def test_the_unit_does_not_matter(diffs: list[float], scale: float) -> None:
    assert running_evidence(np.array(diffs) * scale) == pytest.approx(running_evidence(np.array(diffs)), rel=1e-9)


def test_more_seeds_never_raise_p_and_few_give_no_limit() -> None:
    diffs_N = np.random.default_rng(2).normal(1.0, 1.0, 16)
    p_values = [AnytimeTest(diffs_N=diffs_N[:n]).p for n in range(1, 17)]
    assert p_values == sorted(p_values, reverse=True)
    assert AnytimeTest(diffs_N=diffs_N[:4]).interval(0.95) == (-math.inf, math.inf)
    assert math.isinf(AnytimeTest(diffs_N=np.array([])).interval(0.95)[0])
    with pytest.raises(ValueError, match="not finite"):
        running_evidence(np.array([1.0, math.inf]))
