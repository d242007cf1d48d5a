"""Curves on a grid: means over steps and seeds, and 16 bits that lose nothing one could see."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.types import Floats
from retrain.report.charts import MISSING, Grid, band_of, grid_for, packed
from retrain.verdicts.stats.paired import t_interval

NUMBERS = st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=1, max_size=50)


def unpacked(content: dict[str, Any]) -> Floats:
    """What the page's script does."""
    codes_P = np.frombuffer(base64.b64decode(content["b"]), "<u2")
    values_P = content["lo"] + (content["hi"] - content["lo"]) / (MISSING - 1) * codes_P
    return np.where(codes_P == MISSING, np.nan, values_P)


@given(NUMBERS)
def test_packing_loses_less_than_a_pixel_and_no_gap(values: list[float]) -> None:
    values_P = np.array(values)
    back_P = unpacked(packed(values_P))
    np.testing.assert_array_equal(np.isnan(back_P), np.isnan(values_P))
    if np.isfinite(values_P).any():
        allowed = np.ptp(values_P[np.isfinite(values_P)]) / 131_000 + 1e-12 * np.nanmax(np.abs(values_P)) + 1e-300
        assert np.nanmax(np.abs(back_P - values_P)) <= allowed


@given(st.integers(1, 20_000), st.integers(2, 300), st.integers(1, 40))
def test_the_grid_covers_all_steps_in_few_points_of_equal_size(steps: int, most: int, stride: int) -> None:
    grid = grid_for(steps, most, stride=stride)
    assert grid.num_points <= most
    assert (grid.num_points - 1) * grid.width < steps <= grid.num_points * grid.width
    assert grid.width % stride == 0
    if steps <= most and stride == 1:
        assert grid.width == 1
        assert grid.x_P.tolist() == list(range(1, steps + 1))


@given(NUMBERS, st.integers(1, 7))
def test_a_point_is_the_mean_of_its_steps(values: list[float], width: int) -> None:
    values_R, steps_R = np.array(values), np.arange(len(values), dtype=np.float64)
    grid = Grid(num_points=-(-len(values) // width), width=width)
    for point, mean in enumerate(grid.binned(steps_R, values_R)):
        inside = values_R[point * width : (point + 1) * width]
        inside = inside[np.isfinite(inside)]
        assert (np.isnan(mean) and not inside.size) or mean == pytest.approx(inside.mean(), rel=1e-9, abs=1e-6)


def test_the_evaluation_before_training_is_no_training_step() -> None:
    found = Grid(num_points=2, width=1).binned(np.array([-1.0, 0.0, 1.0]), np.array([9.0, 1.0, 2.0]))
    assert found.tolist() == [1.0, 2.0]


def test_a_band_is_the_interval_of_the_mean_of_the_seeds_that_are_there() -> None:
    nan = float("nan")
    curves = [np.array([0.2, 0.9, nan]), np.array([0.4, 1.0, 0.5]), np.array([0.6, 0.2, 0.7])]
    band, share = band_of(curves), band_of(curves, is_share=True)
    assert band is not None
    assert share is not None
    expected = t_interval(np.array([0.2, 0.4, 0.6]))
    assert (band.low_P[0], band.high_P[0]) == pytest.approx(expected)
    assert (band.low_P[2], band.high_P[2]) == (0.5, 0.7)  # two seeds
    assert band.high_P[1] > 1.0
    assert (share.low_P[0], share.high_P[1]) == (0.0, 1.0)


def test_a_band_of_two_seeds_goes_from_one_to_the_other() -> None:
    nan = float("nan")
    band = band_of([np.array([1.0, 2.0, nan]), np.array([3.0, nan, nan]), np.full(3, nan)])
    assert band is not None
    np.testing.assert_array_equal(band.mean_P, [2.0, 2.0, nan])
    np.testing.assert_array_equal(band.low_P, [1.0, 2.0, nan])
    np.testing.assert_array_equal(band.high_P, [3.0, 2.0, nan])
    assert band.num_seeds == 2
    assert band_of([np.full(3, nan)]) is None
    assert band_of([]) is None
