"""Conformal forecasts: as an independent implementation has them, and their coverage on 40 stored runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.verdicts.stats.conformal import forecast, left_out, needed_conditions

STORED = Path(__file__).with_name("curves.json")  # made by benchmarks/forecast_curves.py: date and versions inside


def reference(past: np.ndarray, finals: np.ndarray, conditions: list[str], new: np.ndarray, alpha: float) -> tuple:
    """The algorithm once more, written from its description."""

    def features(curve: np.ndarray) -> np.ndarray:
        third = max(1, len(curve) // 3)
        newest = curve[-third:].mean()
        return np.array([1.0, newest, newest - curve[:third].mean(), curve[-1] - curve[0]])

    def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.linalg.solve(x.T @ x + 1e-2 * np.diag([0.0, 1.0, 1.0, 1.0]), x.T @ y)

    x, names = np.stack([features(curve) for curve in past]), np.array(conditions)
    labels, last = np.unique(names), x[:, 1]
    mass = []
    for label in labels:
        out = names == label
        errors = np.abs(finals[out] - last[out] - x[out] @ fit(x[~out], (finals - last)[~out]))
        mass += [(error, 1 / ((len(labels) + 1) * out.sum())) for error in errors]
    reach, total = math.inf, 0.0
    for error, weight in sorted(mass):
        total += weight
        if total >= 1 - alpha - 1e-12:
            reach = error
            break
    at = features(new)
    point = at[1] + at @ fit(x, finals - last)
    return point, point - reach, point + reach


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 7), st.sampled_from([0.5, 0.8, 0.9]))
def test_it_is_the_reference(seed: int, groups: int, length: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    conditions = [str(each) for each in rng.permutation(np.repeat(np.arange(groups), 3))]
    curves, finals = rng.random((3 * groups, length)), rng.random(3 * groups)
    found = forecast(curves, finals, conditions, curves[0] / 2, level=level)
    expected = reference(curves, finals, conditions, curves[0] / 2, 1 - level)
    assert (found.point, found.low, found.high) == pytest.approx(expected)
    assert math.isfinite(found.high - found.low) == (groups >= needed_conditions(level))
    order = rng.permutation(len(finals))
    again = forecast(curves[order], finals[order], [conditions[i] for i in order], curves[0] / 2, level=level)
    assert (again.low, again.high) == pytest.approx((found.low, found.high))


def test_impossible_input_is_refused_and_a_promise_has_its_price() -> None:
    assert [needed_conditions(level) for level in (0.5, 0.8, 0.9, 0.95)] == [1, 4, 9, 19]
    curves, finals = np.full((4, 2), 0.5), np.full(4, 0.5)
    for bad in (np.array([0.5, np.nan]), np.array([])):
        with pytest.raises(ValueError, match="finite"):
            forecast(curves, finals, list("aabb"), bad)
    with pytest.raises(ValueError, match="another one"):
        forecast(curves, finals, list("aaaa"), curves[0])


@pytest.mark.parametrize("seen", range(2, 13, 2))
def test_eighty_percent_intervals_hold_for_conditions_left_out_of_stored_runs(seen: int) -> None:
    stored = json.loads(STORED.read_text())
    rates = np.array([run["correct"] for run in stored["runs"]]) / stored["about"]["completions"]
    conditions = [run["condition"] for run in stored["runs"]]
    assert (len(rates), len(set(conditions)), rates.shape[1]) == (40, 10, 13)
    found = left_out(rates[:, :seen], rates[:, -1], conditions)
    assert all(math.isfinite(each.high - each.low) for each in found)
    held = [each.low <= final <= each.high for each, final in zip(found, rates[:, -1], strict=True)]
    assert np.mean(held) >= 0.75


def test_intervals_hold_in_simulated_conditions_and_fail_where_runs_are_taken_for_conditions() -> None:
    """15 x 6 new conditions; taking runs as exchangeable, as naive conformal prediction does, holds in fewer."""
    rng, held, naive = np.random.default_rng(3), [], []
    for _ in range(15):
        level_C = rng.normal(0.5, 0.15, 15)
        names = [str(name) for name in np.repeat(np.arange(9), 4)]
        finals = np.repeat(level_C[:9], 4) + rng.normal(0, 0.01, 36)
        curves = np.full((36, 2), 0.3) + rng.normal(0, 0.01, (36, 2))  # tell nothing about the end
        for level in level_C[9:]:
            new, final = 0.3 + rng.normal(0, 0.01, 2), level + rng.normal(0, 0.01)
            by_condition = forecast(curves, finals, names, new)
            held.append(by_condition.low <= final <= by_condition.high)
            by_run = forecast(curves, finals, [str(i) for i in range(36)], new)
            naive.append(by_run.low <= final <= by_run.high)
    assert np.mean(held) >= 0.78
    assert np.mean(naive) < np.mean(held)
