"""The SEPA schedule: its ramp, its variance rule, its gate, and a resume."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import ControllerView, ResumeError
from retrain_sepa.controller import SepaController
from retrain_sepa.tables import SepaTable
from tests.kit.problems import codes_in


def controller(**settings):
    return SepaController(SepaTable(**{"correct_rate_gate": 0.0, **settings}))


def view(step=0, rate=None, variance=None):
    return ControllerView(step=step, correct_rate=rate, execution_variance=variance)


@pytest.mark.parametrize(
    ("settings", "step", "value"),
    [
        *(({}, step, value) for step, value in ((0, 0), (50, 0), (51, 0.002), (175, 0.25), (300, 0.5), (550, 1))),
        *(({}, 900, 1), ({}, 499, 0.898), ({"steps": 50, "delay_steps": 10}, 49, 0.78)),
        *(({"steps": 0, "delay_steps": 0}, 10_000, 0), ({"steps": 10, "delay_steps": 0}, 1, 0.1)),
    ],
)
def test_the_linear_ramp(settings, step, value):
    assert controller(**settings).value(step) == pytest.approx(value)


def test_gate_opens_for_the_next_step_and_stays_open():
    sepa = controller(correct_rate_gate=0.1, steps=100, delay_steps=0)
    for step, rate in enumerate([0.05, None, math.nan, 0.099]):
        assert sepa.value(step) == 0.0
        sepa.observe(view(step, rate))
        assert sepa.metrics() == {"sepa_gate_open": False}
    assert sepa.value(4) == 0.0
    sepa.observe(view(4, 0.1))
    assert sepa.metrics() == {"sepa_gate_open": True}
    assert sepa.value(5) == pytest.approx(0.05)  # the ramp counted on while the gate was shut
    sepa.observe(view(5, 0.0))
    assert sepa.value(6) == pytest.approx(0.06)


@pytest.mark.parametrize(("ratio", "expected"), [(1, 0), (0.2, 0), (0.15, 0.25), (0.1, 0.5), (0.05, 0.75), (0, 1)])
def test_auto_is_the_larger_of_variance_rule_and_ramp(ratio, expected):
    for steps in (0, 100):
        sepa = controller(schedule="auto", steps=steps, delay_steps=0, ema_decay=0.0, warmup_steps=1)
        sepa.observe(view(variance=0.4))
        sepa.observe(view(variance=0.4 * ratio))
        assert sepa.value(60) == pytest.approx(max(expected, 0.6 if steps else 0.0))


def test_auto_fixes_its_start_after_the_warm_up_steps():
    sepa = controller(schedule="auto", steps=0, warmup_steps=3, ema_decay=0.5)
    for step, variance in enumerate([1.0, None, 3.0, math.inf, -1.0, math.nan]):
        sepa.observe(view(step, variance=variance))
        assert (sepa.state()["var_0"], sepa.value(step)) == (None, 0.0)
    sepa.observe(view(6, variance=4.0))
    assert (sepa.state()["var_0"], sepa.state()["warmup_seen"]) == (pytest.approx(3.0), 3)  # 1 -> 2 -> 3
    sepa.observe(view(7, variance=0.0))
    assert (sepa.state()["var_0"], sepa.state()["var_ema"]) == (pytest.approx(3.0), pytest.approx(1.5))
    sepa = controller(schedule="auto", steps=0, warmup_steps=1, ema_decay=0.0, correct_rate_gate=0.5)
    sepa.observe(view(0, 0.0, 0.0))
    assert (sepa.state()["var_0"], sepa.value(1)) == (1e-8, 0.0)
    sepa.observe(view(1, 0.5, 0.0))
    assert sepa.value(2) == 1.0, "without variance at the start it waits only for the gate"


observations = st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.floats(0, 10)), min_size=1, max_size=30)


@settings(max_examples=50)
@given(observations, st.data(), st.sampled_from(["linear", "auto"]))
def test_a_restored_controller_goes_on_as_if_never_stopped(seen, data, schedule):
    settings = {"schedule": schedule, "correct_rate_gate": 0.3, "steps": 20, "delay_steps": 2, "warmup_steps": 3}
    cut = data.draw(st.integers(0, len(seen)))
    whole, resumed = controller(**settings), controller(**settings)
    for step, (rate, variance) in enumerate(seen):
        if step == cut:
            resumed.restore(json.loads(json.dumps(whole.state())))
        expected = whole.value(step)
        assert 0.0 <= expected <= 1.0
        whole.observe(view(step, rate, variance))
        if step >= cut:
            assert resumed.value(step) == expected
            resumed.observe(view(step, rate, variance))
            assert resumed.state() == whole.state()


def test_state_has_the_documented_fields():
    saved = {"steps": 500, "schedule": "linear", "delay_steps": 50, "correct_rate_gate": 0.0, "ema_decay": 0.99}
    learnt = {"eps": 1e-8, "var_ema": None, "var_0": None, "warmup_seen": 0, "gate_open": True}
    settings = {f"sepa_{name}": value for name, value in saved.items()}
    assert controller().state() == {**settings, "sepa_var_threshold": 0.2, "sepa_warmup": 50, **learnt}
    with pytest.raises(ResumeError) as caught:
        controller(steps=10, schedule="auto").restore(controller(steps=20, schedule="linear").state())
    assert codes_in(caught) == ["resume.sepa-differs"] * 2
    assert [problem.where for problem in caught.value.problems] == ["sepa.steps", "sepa.schedule"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("var_ema", math.nan),
        ("var_0", -1.0),
        ("var_0", "1"),
        ("warmup_seen", 2.5),
        ("warmup_seen", -1),
        ("gate_open", 1),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name, value):
    sepa = controller()
    before = sepa.state()
    missing = {key: kept for key, kept in before.items() if key != name}
    for state in ({**before, name: value}, missing):
        with pytest.raises(ResumeError) as caught:
            sepa.restore(state)
        assert codes_in(caught) == ["resume.sepa-damaged"]
        assert f"sepa.{name}" in caught.value.problems[0].where
    assert sepa.state() == before
