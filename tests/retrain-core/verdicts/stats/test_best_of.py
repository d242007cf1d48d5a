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


@pytest.mark.parametrize("are_pairs", [True, False])
def test_equal_searches_do_not_differ_and_others_do(are_pairs):
    values_N = np.random.default_rng(0).random(20)
    assert exchange_p(values_N, values_N, 4, are_pairs=are_pairs) == (0.0, 1.0)
    difference, p = exchange_p(values_N, values_N + 2.0, 4, are_pairs=are_pairs)
    assert difference == pytest.approx(2.0)
    assert p < 0.001
    assert exchange_p(values_N + 2.0, values_N, 4, are_pairs=are_pairs)[0] == pytest.approx(-2.0)


def test_p_counts_every_exchange_of_few_configurations():
    first_N, second_N = np.array([0.0, 1.0]), np.array([3.0, 4.0])
    # Of the four exchanges of pairs, no and both exchanges are as far apart.
    assert exchange_p(first_N, second_N, 1, are_pairs=True)[1] == pytest.approx(0.5, abs=0.05)
