"""The time of evaluations and of training, apart, and the keys to change where evaluations take longer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Config
from retrain.run.configure import evaluations
from retrain.tools.capacity.forecast import Past, run_time

MEASURED = Past(runs=1, median_step_time_s=10.0, eval_completion_s=4.0 / 32)


def configured(*, max_steps: int = 10, batch_size: int = 4, group_size: int = 8, **evaluation: Any) -> Config:
    training = schema.TrainingTable(max_steps=max_steps, batch_size=batch_size, group_size=group_size)
    return Config(tables={"training": training, "eval": schema.EvalTable(**evaluation)})


def test_measured_times_are_given_apart() -> None:
    found = run_time(configured(every=5, examples=16, samples=2), MEASURED)
    assert (found.training_s, found.evaluation_s) == (100.0, pytest.approx(3 * 32 * 4.0 / 32))
    assert found.total_s == pytest.approx(112.0)
    assert found.rows().keys() == {"training_time", "evaluation_time"}
    assert found.warning == ""
    none = run_time(configured(), MEASURED)
    assert (none.evaluation, none.evaluation_s, none.total_s, none.warning) == ("", 0.0, 100.0, "")


def test_a_resumed_run_counts_the_steps_and_evaluations_that_are_left() -> None:
    found = run_time(configured(max_steps=10, every=3, examples=8, samples=4), MEASURED, steps_done=9)
    assert (found.training_s, found.evaluation_s) == (10.0, 4.0)
    assert found.training == "1 step"
    assert found.evaluation.startswith("1 evaluation of")
    assert run_time(configured(examples=8), MEASURED, steps_done=10).total_s == 0.0


SMALL = st.integers(1, 40)


RUNS = {"max_steps": st.integers(1, 300), "every": st.integers(0, 300), "examples": st.integers(0, 2000)}
SIZES = dict.fromkeys(("batch_size", "group_size", "samples"), SMALL)


@settings(max_examples=40)
@given(values=st.fixed_dictionaries(RUNS | SIZES), past=st.sampled_from([MEASURED, Past()]))
def test_the_keys_that_a_warning_names_are_enough(values: dict[str, int], past: Past) -> None:
    found = run_time(configured(**values), past)
    changes = {name: int(value) for name, value in re.findall(r"\] (\w+) = (\d+)", found.warning)}
    assert not run_time(configured(**values | changes), past).warning
    assert all(changes[name] < values[name] for name in changes.keys() & {"examples", "samples"})
    if "max_steps" not in changes:
        assert changes.get("examples", 8) >= 8


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"every": 1, "examples": 64, "samples": 2}, "set [eval] every = 2"),
        ({"examples": 200, "samples": 4}, "set [eval] examples = 100"),
        ({"examples": 10, "samples": 64}, "set [eval] samples = 40"),
    ],
)
def test_one_key_is_named_where_it_is_enough(values: dict[str, int], fix: str) -> None:
    assert fix in run_time(configured(**values), MEASURED).warning


def test_without_a_measurement_completions_decide_and_no_time_is_invented() -> None:
    found = run_time(configured(examples=250, samples=4), Past())
    assert (found.evaluation_s, found.training_s, found.rows()) == (None, None, {})
    assert found.warning
    assert not run_time(configured(examples=16), Past()).warning
    shortest = configured(max_steps=1, batch_size=1, group_size=2, examples=8, samples=1)
    assert "set [training] max_steps = 4" in run_time(shortest, Past()).warning


@pytest.mark.parametrize(("steps", "every"), [(70, 20), (40, 20), (7, 0), (1, 1), (3, 1)])
@pytest.mark.parametrize("done", [0, 1, 20, 21])
def test_evaluations_of_a_run(steps: int, every: int, done: int) -> None:
    after = [step for step in range(done, steps) if step + 1 == steps or (every and (step + 1) % every == 0)]
    assert evaluations(steps, every, done) == (done == 0) + len(after)
