"""The sign-flip test and its interval: against counting, scipy and Hartigan's subset means, and against each other."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.verdicts.stats.flip import FlipTest, at_most

DIFFS = st.lists(st.integers(-20, 20), min_size=1, max_size=9)
ALPHAS = st.one_of(st.floats(0.001, 0.4), st.sampled_from([0.05, 0.1, 0.05 / 3, 0.05 / 19, 1 / 32, 3 / 64, 0.25]))


def hartigan(diffs: list[int], level: float) -> tuple[float, float]:
    """Hartigan's typical values by their definition: all subset means in order, k counted off from either end."""
    subsets = [each for size in range(1, len(diffs) + 1) for each in combinations(diffs, size)]
    means = sorted(sum(each) / len(each) for each in subsets)
    k = math.floor((1 - level) / 2 * (len(means) + 1) + 1e-9)
    return (means[k - 1], means[-k]) if k else (-math.inf, math.inf)


def leaves_out_zero(interval: tuple[float, float]) -> bool:
    return interval[0] > 0.0 or interval[1] < 0.0


@settings(max_examples=50)
@given(DIFFS)
def test_p_is_the_share_of_sign_patterns(diffs: list[int]) -> None:
    sums = [abs(sum(s * d for s, d in zip(signs, diffs, strict=True))) for signs in product((1, -1), repeat=len(diffs))]
    want = sum(each >= abs(sum(diffs)) for each in sums) / len(sums)
    assert FlipTest.of(np.array(diffs, dtype=float)).p == want
    assert FlipTest.of(np.array(diffs) / 1000).p == want  # where sums of equal patterns differ in the last digit


@settings(max_examples=50)
@given(DIFFS, st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99, 1 - 0.05 / 19]))
def test_the_interval_is_hartigans(diffs: list[int], level: float) -> None:
    assert FlipTest.of(np.array(diffs, dtype=float)).interval(level) == pytest.approx(hartigan(diffs, level), abs=1e-12)


@example(diffs=[1, 1, 1, 1, 1, 1], alpha=1 / 32, scale=1e-3, extra=0)
@example(diffs=[0, 0, 0, 0, 0, 0], alpha=0.05, scale=1.0, extra=0)
@example(diffs=[3, -3, 2, -2, 1, -1], alpha=0.25, scale=1e300, extra=9)
@settings(max_examples=60)
@given(
    diffs=DIFFS,
    alpha=ALPHAS,
    scale=st.sampled_from([1.0, 0.1, 1 / 3, 1e-3, 1e-300, 1e300]),
    extra=st.sampled_from([0, 0, 0, 9, 30]),
)
def test_the_interval_leaves_out_zero_exactly_where_the_test_rejects(
    diffs: list[int], alpha: float, scale: float, extra: int
) -> None:
    """Ties, zeros, any unit, and beyond 14 seeds as well, where patterns are drawn."""
    diffs_N = np.resize(np.array(diffs, dtype=float), len(diffs) + extra) * scale
    test = FlipTest.of(diffs_N, patterns=500)
    interval = test.interval(1.0 - alpha)
    assert leaves_out_zero(interval) == at_most(test.p, alpha)
    assert 0.0 < test.smallest_p <= test.p <= 1.0
    slack = 1e-9 * float(np.abs(diffs_N).max())
    assert interval[0] - slack <= diffs_N.mean() <= interval[1] + slack
    assert math.isinf(interval[0]) == math.isinf(interval[1]) == (not at_most(1 / (test.means_K.size // 2), alpha))


@settings(max_examples=30)
@given(st.lists(st.floats(-1, 1), min_size=15, max_size=60), ALPHAS)
def test_many_seeds_agree_as_well_and_are_shifted_with_the_data(diffs: list[float], alpha: float) -> None:
    diffs_N = np.array(diffs)
    for shift in (0.0, 0.3, -0.3):
        test = FlipTest.of(diffs_N + shift, patterns=300)
        assert leaves_out_zero(test.interval(1.0 - alpha)) == at_most(test.p, alpha)
    moved, still = FlipTest.of(diffs_N + 2.0, patterns=300), FlipTest.of(diffs_N, patterns=300)
    assert np.subtract(moved.interval(0.8), 2.0) == pytest.approx(still.interval(0.8), abs=1e-9)


@pytest.mark.parametrize("num_seeds", [15, 40])
def test_drawn_patterns_are_those_of_scipy_up_to_monte_carlo_error(num_seeds: int) -> None:
    diffs_N = np.random.default_rng(num_seeds).normal(0.35, 1.0, num_seeds)

    def mean(x: Any, axis: int = -1) -> Any:
        return x.mean(axis=axis)

    options: dict[str, Any] = {"permutation_type": "samples", "vectorized": True, "n_resamples": 20_000}
    want = stats.permutation_test((diffs_N,), mean, **options, rng=np.random.default_rng(1)).pvalue
    assert FlipTest.of(diffs_N).p == pytest.approx(want, abs=5 * math.sqrt(want * (1 - want) * 1.5 / 10_000))
    low, high = FlipTest.of(diffs_N).interval(0.95)
    by_t = stats.t.interval(0.95, num_seeds - 1, diffs_N.mean(), stats.sem(diffs_N))
    assert (low, high) == pytest.approx(by_t, abs=0.12 * (by_t[1] - by_t[0]))


def test_exact_and_drawn_patterns_meet_at_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    diffs_N = np.random.default_rng(3).normal(0.6, 1.0, 14)
    exact = FlipTest.of(diffs_N)
    monkeypatch.setattr("retrain.verdicts.stats.flip.EXACT_SEEDS", 2)
    drawn = FlipTest.of(diffs_N, patterns=50_000)
    assert (exact.means_K.size, drawn.means_K.size) == (2 * 8192, 2 * 50_000)
    assert drawn.p == pytest.approx(exact.p, abs=5 * math.sqrt(exact.p / 50_000))
    assert drawn.interval(0.95) == pytest.approx(exact.interval(0.95), abs=0.03)
    # Of three seeds, many drawn patterns turn no sign or all: these bound nothing.
    again = FlipTest.of(diffs_N[:3], patterns=4_000)
    assert again.p == pytest.approx(FlipTest.of(diffs_N[:3]).p, abs=0.05)
    assert again.interval(0.95) == (-math.inf, math.inf)


def test_a_seed_without_a_difference_counts_for_nothing_in_the_best_case() -> None:
    test = FlipTest.of(np.array([5.0, 6, 7, 8, 9, 0]))
    assert (test.p, test.smallest_p) == (0.0625, 0.0625)  # as with five seeds
    assert FlipTest.of(np.array([5.0, -6, 7, 8, 9, 1])).smallest_p == 0.03125
    assert FlipTest.of(np.zeros(20)).smallest_p == 1.0


@pytest.mark.parametrize("diffs", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_what_is_no_difference_is_refused(diffs: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        FlipTest.of(np.array(diffs))
