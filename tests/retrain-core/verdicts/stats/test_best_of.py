"""The expected best of k, against every way to draw k configurations."""

from itertools import product

import numpy as np
import pytest

from retrain.verdicts.stats.best_of import best_intervals, exchange_p, expected_best


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_the_mean_over_every_draw_of_k(size):
    values_N = np.array([0.3, 0.9, 0.1, 0.4])
    drawn = [max(draw) for draw in product(values_N, repeat=size)]
    assert expected_best(values_N, [size]) == pytest.approx([np.mean(drawn)])


def test_intervals_hold_the_estimate():
    values_N = np.random.default_rng(0).random(20)
    for estimate, (low, high) in zip(
        expected_best(values_N, [1, 4, 20]), best_intervals(values_N, [1, 4, 20]), strict=True
    ):
        assert low <= estimate <= high


def apart(values):
    return {number: [value] for number, value in enumerate(values)}


def test_equal_searches_do_not_differ_and_others_do():
    values_N = np.random.default_rng(0).random(20)
    assert exchange_p(apart(values_N), apart(values_N), 4) == (0.0, 1.0)
    difference, p = exchange_p(apart(values_N), apart(values_N + 2.0), 4)
    assert difference == pytest.approx(2.0)
    assert p < 0.001
    assert exchange_p(apart(values_N + 2.0), apart(values_N), 4)[0] == pytest.approx(-2.0)


def test_p_counts_every_exchange_of_few_configurations():
    # Of the four exchanges of pairs, no and both exchanges are as far apart.
    assert exchange_p(apart([0.0, 1.0]), apart([3.0, 4.0]), 1)[1] == 0.5
    assert exchange_p(apart(range(5)), apart(range(10, 15)), 1)[1] == 2 / 2**5
    # In other units the sums of ties differ in their last digits.
    assert exchange_p(apart([0.1e9, 0.2e9]), apart([0.3e9, 0.4e9]), 1)[1] == 0.5


def test_a_block_is_exchanged_whole_and_one_of_a_single_side_stays():
    assert exchange_p({"a": [0.0, 1.0, 2.0]}, {"a": [7.0, 8.0, 9.0]}, 1) == (pytest.approx(7.0), 1.0)
    assert exchange_p({"a": [0.0], "b": [1.0]}, {"c": [7.0]}, 1) == (pytest.approx(6.5), 1.0)
    assert exchange_p({"a": [0.0, 1.0], "b": [1.0]}, {"a": [7.0], "b": [6.0, 8.0]}, 1)[1] == 0.5


@pytest.mark.parametrize(("num_tried", "simulations"), [(8, 4_000), (24, 400)])
def test_equal_searches_are_told_apart_in_at_most_five_percent(num_tried, simulations):
    pairs = np.random.default_rng(1).standard_normal((simulations, 2, num_tried))
    found = [exchange_p(apart(first), apart(second), num_tried)[1] <= 0.05 for first, second in pairs]
    assert np.mean(found) < 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(pairs))
