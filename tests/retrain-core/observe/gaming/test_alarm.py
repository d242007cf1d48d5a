"""The alarm: silent however the clean gap looks, heard soon after a change, the same after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.observe.gaming.alarm import ALPHA, GamingAlarm, Verdicts

GROUP = 8
CLEAN = {  # chance right, chance that the shadow confirms what is right, and what is wrong and paid all the same
    "both rise": (lambda t: 0.2 + 0.7 * t, 1.0, 0.0),
    "stricter throughout": (lambda t: 0.2 + 0.7 * t, 0.5, 0.0),
    "false verdicts": (lambda t: 0.4 + 0.5 * t, 0.97, 0.05),
    "unrelated": (lambda t: 0.5, 0.5, 0.0),
}


def verdicts(is_paid: np.ndarray, is_right: np.ndarray) -> Verdicts:
    confirmed = int((is_paid & is_right).sum())
    missed = int(is_right.sum()) - confirmed
    return Verdicts(judged=is_paid.size, paid=int(is_paid.sum()), confirmed=confirmed, missed=missed)


def step_of(
    rng: np.random.Generator, right: float, confirms: float, paid_wrong: float, groups: int = 8
) -> list[Verdicts]:
    """Groups whose prompts differ in difficulty, and in how the shadow takes their answers."""
    found = []
    for _ in range(groups):
        chance = rng.beta(2 * right + 0.01, 2 * (1 - right) + 0.01)
        confirmed = confirms if confirms == 1.0 else rng.beta(2 * confirms, 2 * (1 - confirms))
        is_right = rng.random(GROUP) < chance
        is_paid = is_right | (rng.random(GROUP) < paid_wrong)
        is_confirmed = is_right & (rng.random(GROUP) < confirmed)
        found.append(verdicts(is_paid, is_confirmed))
    return found


def first_alarm(alarm: GamingAlarm, steps: list[list[Verdicts]]) -> int | None:
    for step, groups in enumerate(steps):
        alarm.observe(step, groups)
        if alarm.is_on:
            return step
    return None


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("num_runs", [3, pytest.param(150, marks=pytest.mark.long)])
def test_clean_runs_alarm_no_more_often_than_promised(name: str, num_runs: int) -> None:
    rate, confirms, paid_wrong = CLEAN[name]
    alarms = 0
    for seed in range(num_runs):
        rng = np.random.default_rng(seed)
        steps = [step_of(rng, rate(step / 60), confirms, paid_wrong) for step in range(60)]
        alarms += first_alarm(GamingAlarm(), steps) is not None
    assert alarms <= ALPHA * num_runs


@pytest.mark.parametrize("confirms", [1.0, 0.7])
def test_gaming_that_takes_over_within_ten_steps_is_heard_while_it_does(confirms: float) -> None:
    rng = np.random.default_rng(7)
    clean = [step_of(rng, 0.3 + 0.015 * step, confirms, 0.0) for step in range(40)]
    gamed = [step_of(rng, 0.9 * (1 - share), confirms, share) for share in np.linspace(0.1, 1.0, 10)]
    alarm = GamingAlarm()
    heard = first_alarm(alarm, clean + gamed)
    assert heard is not None
    assert 40 <= heard < 50
    assert alarm.since is not None
    assert 35 <= alarm.since <= heard


def test_the_alarm_ends_when_the_gap_has_closed_and_can_begin_again() -> None:
    rng = np.random.default_rng(3)
    alarm = GamingAlarm()
    seen = []
    for step, share in enumerate([0.0] * 20 + [0.9] * 6 + [0.0] * 30 + [0.9] * 6):
        alarm.observe(step, step_of(rng, 0.8, 1.0, share))
        seen.append(alarm.is_on)
    assert not any(seen[:20])
    assert seen[25]
    assert not seen[55]
    assert seen[61]


def test_nothing_paid_and_no_shadow_change_nothing() -> None:
    alarm = GamingAlarm()
    before = alarm.state()
    alarm.observe(0, [])
    alarm.observe(1, [])
    assert alarm.state() == before
    assert alarm.since is None


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_restored_alarm_goes_on_as_if_never_stopped(data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=8, max_size=8).map(np.array)
    group = st.tuples(flags, flags).map(lambda pair: verdicts(*pair))
    steps = data.draw(st.lists(st.lists(group, min_size=4, max_size=4), min_size=10, max_size=15))
    cut = data.draw(st.integers(0, len(steps)))
    whole, first, second = GamingAlarm(), GamingAlarm(), GamingAlarm()
    for step, groups in enumerate(steps):
        whole.observe(step, groups)
        (first if step < cut else second).observe(step, groups) if step != cut else None
        if step == cut:
            second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
            second.observe(step, groups)
    last = first if cut == len(steps) else second
    assert last.state() == whole.state()
    assert last.evidence == whole.evidence
    assert 0.0 <= whole.evidence <= 20.0 / ALPHA * 1.001
