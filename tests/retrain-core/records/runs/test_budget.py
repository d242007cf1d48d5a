"""Curves on a common budget, and the number that each becomes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import trapezoid

from retrain.records.runs.curves import Align, Curves, Direction, Metric, Spent, Summary, along, value_at

RATE, HELD_OUT = "correct_rate", "eval_correct_rate"
NAN = math.nan


def spent(
    values: Sequence[float], *, field: str = RATE, first: int = 0, align: str = "steps", **costs: object
) -> Spent:
    steps_R = np.arange(first, first + len(values), dtype=float)
    columns = {field: np.array(values, dtype=float)} | {n: np.array(c, dtype=float) for n, c in costs.items()}
    made = along(Curves(steps_R=steps_R, values=columns), Align(align))
    assert made is not None
    return made


def value(curve: Spent, summary: str, *, field: str = RATE, budget: float = math.inf, **more: object) -> float | None:
    return value_at(curve, Metric(field, Summary(summary)), budget=budget, **more)  # type: ignore[arg-type]


def test_final_is_the_mean_of_the_last_tenth_of_the_steps() -> None:
    curve = spent(np.arange(40) / 40)
    assert value(curve, "final") == pytest.approx(np.mean(np.arange(36, 40) / 40))
    assert value(curve, "final", budget=20) == pytest.approx(np.mean([18 / 40, 19 / 40]))
    assert value(curve, "final", last=1) == 39 / 40
    assert value(curve, "final", last=10**9) == pytest.approx(np.mean(np.arange(40) / 40))
    assert value(spent([0.5]), "final") == 0.5


def test_steps_without_a_number_are_left_out_never_zero() -> None:
    assert value(spent([0.5, NAN, 0.7, NAN]), "final", last=2) == 0.7
    assert value(spent([0.5, 0.7, NAN, NAN]), "final", last=2) is None
    assert value(spent([NAN, NAN]), "best") is None
    assert value(spent([NAN, NAN]), "auc") is None
    assert value(spent([0.5, NAN, 0.7]), "best", last=2) == pytest.approx(0.6)


def test_best_is_the_best_mean_of_consecutive_steps() -> None:
    curve = spent([0.0, 0.9, 0.1, 0.5, 0.6, 0.0])
    assert value(curve, "best", last=2) == pytest.approx(0.55)
    assert value(curve, "best", last=1) == 0.9
    assert value(curve, "best", last=2, direction=Direction.LOWER) == pytest.approx(0.3)
    assert value(curve, "best", last=2, budget=3) == pytest.approx(0.5)


def test_held_out_values_are_single_and_do_not_count_before_training() -> None:
    values = [0.9, NAN, 0.3, NAN, 0.5, NAN]
    curve = spent(values, field=HELD_OUT, first=-1)
    assert value(curve, "final", field=HELD_OUT) == 0.5
    assert value(curve, "best", field=HELD_OUT) == 0.5
    assert value(curve, "final", field=HELD_OUT, budget=3) == 0.3
    assert value(curve, "final", field=HELD_OUT, budget=1) is None
    assert value(curve, "auc", field=HELD_OUT, budget=4) == pytest.approx(trapezoid([0.9, 0.3, 0.5], [0, 2, 4]) / 4)


@given(
    values=st.lists(st.floats(-10, 10), min_size=2, max_size=30),
    costs=st.lists(st.floats(0.1, 10), min_size=30, max_size=30),
    part=st.floats(0.0, 1.0),
)
def test_the_area_is_scipys_cut_at_the_budget(values: list[float], costs: list[float], part: float) -> None:
    curve = spent(values, align="tokens", sampled_tokens=costs[: len(values)])
    x = np.cumsum(costs[: len(values)])
    budget = float(x[0] + part * (x[-1] - x[0]))
    dense = np.unique(np.append(x[x <= budget], budget))
    found = value(curve, "auc", budget=budget)
    if len(dense) == 1:
        assert found == values[0]
    else:
        want = trapezoid(np.interp(dense, x, values), dense) / (dense[-1] - dense[0])
        assert found == pytest.approx(want, abs=1e-6)


def test_tokens_and_seconds_are_cumulated_and_evaluation_is_free() -> None:
    values, tokens, seconds = [0.1, 0.2, 0.3, 0.4], [5, 10, NAN, 30], [9.0, 1.0, 2.0, 3.0]
    costs = {"sampled_tokens": tokens, "step_time_s": seconds}
    assert spent(values, first=-1, align="tokens", **costs).spent_R.tolist() == [0, 10, 10, 40]
    assert spent(values, first=-1, align="seconds", **costs).spent_R.tolist() == [0, 1, 3, 6]
    assert spent(values, first=-1).spent_R.tolist() == [0, 1, 2, 3]
    assert along(Curves(steps_R=np.arange(2.0), values={}), Align.TOKENS) is None


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=40), last=st.integers(1, 50))
def test_every_summary_lies_between_the_extremes(values: list[float], last: int) -> None:
    curve = spent(values)
    for summary in Summary:
        found = value(curve, summary, last=last)
        assert found is not None
        assert min(values) - 1e-12 <= found <= max(values) + 1e-12
