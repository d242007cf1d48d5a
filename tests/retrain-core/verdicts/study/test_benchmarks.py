"""Aggregates over several benchmarks, against what rliable 1.2.0 gave for the same scores, and against itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.verdicts.study.sets import (
    bootstrap,
    improvement_over_benchmarks,
    interquartile_mean,
    optimality_gap,
    performance_profile,
)

# Beta-distributed scores of 8 and 7 runs on 5 tasks, the third of them rounded to tenths for ties.
A_NM = np.array(
    [
        [0.41, 0.797, 0.5, 0.749, 0.754],
        [0.661, 0.919, 0.7, 0.566, 0.761],
        [0.598, 0.661, 0.3, 0.583, 0.91],
        [0.678, 0.275, 0.4, 0.838, 0.602],
        [0.54, 0.925, 0.7, 0.707, 0.927],
        [0.8, 0.571, 0.6, 0.632, 0.328],
        [0.774, 0.609, 0.7, 0.496, 0.531],
        [0.789, 0.778, 0.4, 0.567, 0.645],
    ]
)
B_NM = np.array(
    [
        [0.59, 0.747, 0.6, 0.578, 0.51],
        [0.836, 0.634, 0.8, 0.777, 0.699],
        [0.772, 0.307, 0.7, 0.786, 0.707],
        [0.744, 0.78, 0.6, 0.807, 0.676],
        [0.653, 0.746, 0.6, 0.607, 0.53],
        [0.855, 0.809, 0.5, 0.839, 0.634],
        [0.68, 0.349, 0.6, 0.565, 0.917],
    ]
)
TENTHS_T = np.linspace(0.0, 1.0, 11)
# rliable 1.2.0 with arch 8.0.0 and numpy 2.4.6; intervals of 20,000 resamples by `get_interval_estimates`.
RLIABLE_IQM = (0.6521999999999999, 0.6818947368421051)
RLIABLE_MEAN = (0.642025, 0.6724)
RLIABLE_GAP = 0.35797500000000004
RLIABLE_IMPROVEMENT = 0.5607142857142857
RLIABLE_PROFILE_T = (1.0, 1.0, 1.0, 0.95, 0.875, 0.8, 0.6, 0.35, 0.125, 0.1, 0.0)
RLIABLE_LIMITS = {
    "iqm": (0.5981500000000001, 0.7040500000000001),
    "gap": (0.30922375, 0.40802499999999997),
    "mean": (0.591975, 0.6907762499999998),
}


def mean_score(scores_NM: Floats) -> Floats:
    return np.asarray(scores_NM.mean(axis=(-2, -1)))


STATISTICS = {"iqm": interquartile_mean, "gap": optimality_gap, "mean": mean_score}
SCORES = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=2, max_size=9).map(np.array)


def test_aggregates_are_rliables() -> None:
    assert (float(interquartile_mean(A_NM)), float(interquartile_mean(B_NM))) == pytest.approx(RLIABLE_IQM)
    assert (float(mean_score(A_NM)), float(mean_score(B_NM))) == pytest.approx(RLIABLE_MEAN)
    assert float(optimality_gap(A_NM)) == pytest.approx(RLIABLE_GAP)
    assert float(optimality_gap(np.array([[0.5, 1.0], [1.5, 3.0]]))) == 0.125  # scores above 1 make up for none
    assert improvement_over_benchmarks(A_NM, B_NM) == pytest.approx(RLIABLE_IMPROVEMENT)
    assert performance_profile(A_NM, TENTHS_T) == pytest.approx(RLIABLE_PROFILE_T)


@pytest.mark.parametrize("name", STATISTICS)
def test_the_stratified_interval_is_rliables_up_to_drawing(name: str) -> None:
    limits = bootstrap(A_NM, STATISTICS[name], Seeds(1).stream("test"), resamples=10_000, is_stratified=True)
    assert (float(limits[0]), float(limits[1])) == pytest.approx(RLIABLE_LIMITS[name], abs=3e-3)


def test_rliable_itself_agrees() -> None:
    """Where the package is installed: `pip install rliable`; CI does without it."""
    metrics = pytest.importorskip("rliable.metrics")
    assert float(interquartile_mean(B_NM)) == pytest.approx(metrics.aggregate_iqm(B_NM))
    assert float(optimality_gap(2 * B_NM)) == pytest.approx(metrics.aggregate_optimality_gap(2 * B_NM, 1.0))
    assert improvement_over_benchmarks(A_NM, B_NM) == pytest.approx(metrics.probability_of_improvement(B_NM, A_NM))


def test_whole_runs_keep_what_sets_have_in_common() -> None:
    """A seed that is good on all sets makes the mean over sets as uncertain as one set; per-set drawing forgets it."""
    common_NM = np.repeat(np.linspace(0.2, 0.8, 8)[:, None], 6, axis=1)
    stream = Seeds(2).stream
    whole, stratified = (bootstrap(common_NM, mean_score, stream("test"), is_stratified=each) for each in (False, True))
    assert whole[1] - whole[0] > 2.0 * (stratified[1] - stratified[0])


@settings(max_examples=15)
@given(SCORES, st.permutations(range(3)))
def test_aggregates_stay_between_the_scores_whatever_the_order(scores_NM: np.ndarray, order: list[int]) -> None:
    value = float(interquartile_mean(scores_NM))
    assert scores_NM.min() - 1e-12 <= value <= scores_NM.max() + 1e-12
    assert float(interquartile_mean(scores_NM[::-1, order])) == pytest.approx(value)
    profile_T = performance_profile(scores_NM, TENTHS_T)
    assert (np.diff(profile_T) <= 0.0).all()
    assert float(profile_T[-1]) == 0.0
    both = improvement_over_benchmarks(scores_NM, scores_NM[:2]) + improvement_over_benchmarks(scores_NM[:2], scores_NM)
    assert both == pytest.approx(1.0)


@pytest.mark.parametrize("scores_NM", [np.ones((1, 3)), np.ones((3, 0)), np.array([[0.1], [np.nan]])])
def test_what_cannot_be_resampled_is_refused(scores_NM: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite scores of two runs or more"):
        bootstrap(scores_NM, mean_score, Seeds(0).stream("test"))
