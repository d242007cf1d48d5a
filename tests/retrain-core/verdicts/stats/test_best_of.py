"""The expected best of k, against every way to draw k configurations."""

from itertools import product

import numpy as np
import pytest

from retrain.verdicts.stats.best_of import best_intervals, difference_of_best, expected_best


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_the_mean_over_every_draw_of_k(size):
    values_N = np.array([0.3, 0.9, 0.1, 0.4])
    drawn = [max(draw) for draw in product(values_N, repeat=size)]
    assert expected_best(values_N, [size]) == pytest.approx([np.mean(drawn)])


def test_intervals_hold_the_estimate_and_equal_searches_do_not_differ():
    values_N = np.random.default_rng(0).random(20)
    for estimate, (low, high) in zip(
        expected_best(values_N, [1, 4, 20]), best_intervals(values_N, [1, 4, 20]), strict=True
    ):
        assert low <= estimate <= high
    difference, (low, high) = difference_of_best(values_N, values_N, 4)
    assert difference == 0.0
    assert low < 0.0 < high
