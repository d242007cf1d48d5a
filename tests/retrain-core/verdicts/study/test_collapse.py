"""Which seeds count as collapsed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.verdicts.study.comparison import FAR, collapsed

GOOD = np.array([0.80, 0.81, 0.79, 0.82, 0.80, 0.78, 0.81, 0.80])


def with_value(values_N: np.ndarray, *fallen: float) -> np.ndarray:
    return np.concatenate([fallen, values_N[len(fallen) :]])


def test_one_and_two_seeds_far_below_are_found_and_one_above_is_not() -> None:
    values = [GOOD, with_value(GOOD, 0.1), with_value(GOOD, 0.1, 0.2), with_value(GOOD, 0.99)]
    assert collapsed(values) == [[], [0], [0, 1], []]


def test_a_gap_counts_only_if_it_is_wide_in_itself_too() -> None:
    """Rates of close seeds: six standard deviations may be two examples out of a hundred."""
    values_N = with_value(GOOD, 0.72)
    assert collapsed([values_N]) == [[0]]
    assert collapsed([values_N], least_gap=0.09) == [[]]
    assert collapsed([np.array([0.8] * 7 + [0.1])], least_gap=0.05) == [[7]]  # without any spread
    assert collapsed([np.array([0.8] * 7 + [0.8 - 1e-12])]) == [[]]


def test_the_spread_of_the_other_conditions_counts() -> None:
    close_N = np.array([0.800, 0.801, 0.799, 0.800, 0.790])
    assert collapsed([close_N]) == [[4]]
    assert collapsed([close_N, np.linspace(0.6, 0.9, 8)]) == [[], []]


def test_few_seeds_and_empty_conditions_have_none() -> None:
    assert collapsed([np.array([0.8, 0.8, 0.1]), np.zeros(0)]) == [[], []]
    assert collapsed([np.zeros(0), with_value(GOOD, 0.1)]) == [[], [0]]


@settings(max_examples=20)
@given(st.lists(st.integers(-100, 100), min_size=4, max_size=12), st.integers(1, 5), st.integers(-50, 50))
def test_units_and_origin_do_not_matter(values: list[int], scale: int, shift: int) -> None:
    values_N = np.array(values, dtype=float)
    found = collapsed([values_N])[0]
    assert found == collapsed([values_N * scale + shift])[0]
    gap = 1.4826 * FAR * np.median(np.abs(values_N - np.median(values_N)))
    assert all(values_N[index] < np.median(values_N) - gap for index in found)
