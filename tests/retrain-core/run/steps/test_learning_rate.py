"""The course of the learning rate: documented vectors, bounds, and how it reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.run.steps.updates import Course

FACTORS = {  # warm-up 2, 10 steps
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    "cosine": [0.5, 1, 1, 0.96194, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.03806],
}


@pytest.mark.parametrize("schedule", FACTORS)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_rates_of_the_schedules(schedule: str, floor: float) -> None:
    course = Course(lr=0.5, max_steps=10, schedule=schedule, warmup_steps=2, min_lr_ratio=floor)
    wanted = [0.5 * (factor * (1 - floor) + floor) for factor in FACTORS[schedule]]
    assert [course.rate(step) for step in range(10)] == pytest.approx(wanted, abs=1e-6)


def test_what_a_course_says_of_itself() -> None:
    assert (str(Course(lr=1e-3, max_steps=5)), Course(lr=1e-3, max_steps=5).is_constant) == ("constant", True)
    endless = Course(lr=1.0, max_steps=3, warmup_steps=5)
    assert (endless.is_constant, endless.falls) == (False, False)
    assert [endless.rate(step) for step in range(3)] == pytest.approx([0.2, 0.4, 0.6])
    assert endless.warning == "warmup_steps = 5, max_steps = 3: the learning rate never reaches lr"
    whole = Course(lr=1.0, max_steps=3, warmup_steps=3, schedule="linear", min_lr_ratio=0.5)
    assert (whole.warning, whole.falls, whole.rate(2)) == ("", True, 1.0)
    assert str(whole) == "linear, from 1 down to 0.5 within 3 steps, after 3 steps of warm-up"


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 8),
    steps=st.integers(1, 12),
    floor=st.floats(0.0, 1.0),
)
def test_a_rate_rises_then_falls_and_keeps_within_its_bounds(
    schedule: str, warmup: int, steps: int, floor: float
) -> None:
    course = Course(lr=2.0, max_steps=steps, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)
    rates = [course.rate(step) for step in range(steps)]
    assert all(2.0 * floor - 1e-12 <= rate <= 2.0 + 1e-12 and rate > 0.0 for rate in rates)
    rising, falling = rates[: warmup + 1], rates[warmup:]
    assert all(second >= first - 1e-12 for first, second in pairwise(rising))
    assert all(second <= first + 1e-12 for first, second in pairwise(falling))
