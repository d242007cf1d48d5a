"""Memory and time from past runs and by formula: the same work counts, evaluations apart, campaigns at once."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Config
from retrain.run.configure import evaluations
from retrain.tools.capacity.forecast import Past, past_runs, run_time
from retrain.tools.capacity.workload import Schedule, schedule_of, workload_of

HERE = {"machine": platform.machine(), "cores": os.cpu_count()}
MEASURED = {"median_step_time_s": 2.0, "peak_memory_bytes": 1000, "memory_at_start_bytes": 400}


class History:
    """A folder of runs: `add("a/b", training={"batch_size": 9}, measured={...}, hardware={...})` makes one."""

    def __init__(self, config: Config, logs: Path) -> None:
        self.config, self.logs = config, logs

    def add(self, name: str, *, measured: Any = MEASURED, hardware: Any = HERE, **tables: dict[str, Any]) -> None:
        values = self.config.as_dict()
        values |= {table: values[table] | changes for table, changes in tables.items()}
        content = {"config": values, "hardware": hardware, "capacity": {"measured": measured}}
        self.write(name, json.dumps(content))

    def write(self, name: str, text: str) -> None:
        (self.logs / name).mkdir(parents=True)
        (self.logs / name / "run.json").write_text(text)

    @property
    def past(self) -> Past:
        return past_runs(self.config, self.logs)


@pytest.fixture
def history(load: Callable[..., Any], tmp_path: Path) -> History:
    return History(load("[training]\nbatch_size = 4\n")[0], tmp_path / "logs")


def test_the_median_of_the_same_work_is_taken(history: History) -> None:
    assert history.past == Past()
    for number, seconds in enumerate((1.0, 3.0, 50.0)):
        history.add(f"campaign/runs/{number}", measured=MEASURED | {"median_step_time_s": seconds})
    expected = Past(runs=3, median_step_time_s=3.0, peak_memory_bytes=1000, memory_at_start_bytes=400)
    assert history.past == expected


@pytest.mark.parametrize(
    ("further", "seconds"),
    [
        ({"time_shares": {"sample": 0.4}}, 0.4 * 2.0 / (4 * 16)),
        ({"time_shares": {"sample": 0.4}, "eval_completion_time_s": 0.005}, 0.005),
        ({"time_shares": {"sample": "most"}, "eval_completion_time_s": None}, None),
        ({}, None),
    ],
)
def test_evaluations_cost_as_measured_or_as_much_as_sampling(
    further: dict[str, Any], seconds: float | None, history: History
) -> None:
    history.add("a", measured=MEASURED | further)
    assert history.past.eval_completion_s == (seconds and pytest.approx(seconds))


def test_other_work_says_only_what_an_idle_process_needs(history: History) -> None:
    history.add("a", training={"batch_size": 9})
    history.add("b", training={"lr": 0.5})  # changes neither time nor memory
    found = history.past
    assert (found.runs, found.median_step_time_s, found.memory_at_start_bytes) == (1, 2.0, 400)
    history.add("bf16", model={"dtype": "bf16"})
    assert history.past.runs == 1
    found = history.past
    history.add("c", model={"model": "other"}, measured=MEASURED | {"memory_at_start_bytes": 10**9})
    assert history.past == found


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": HERE | {"cores": -1}},
        {"hardware": None},
        {"measured": None},
        {"measured": []},
        {"measured": dict.fromkeys(MEASURED, "2")},
        {"measured": dict.fromkeys(MEASURED, -1.0)},
        {"measured": dict.fromkeys(MEASURED, True)},
        {"measured": dict.fromkeys(MEASURED, 1e300)},
    ],
)
def test_what_is_from_elsewhere_or_no_number_does_not_count(changes: dict[str, Any], history: History) -> None:
    history.add("a", **changes)
    found = history.past
    assert (found.median_step_time_s, found.peak_memory_bytes) == (None, None)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"capacity": 3}', '{"capacity": {"measured": {}}}', "{" * 10**5])
def test_a_damaged_manifest_and_a_circle_of_links_are_passed_over(text: str, history: History) -> None:
    history.add("good")
    (history.logs / "loop").symlink_to(history.logs, target_is_directory=True)
    history.write("bad", text)
    assert history.past.runs == 1


TIMED = Past(runs=1, median_step_time_s=10.0, eval_completion_s=4.0 / 32)


def configured(*, max_steps: int = 10, batch_size: int = 4, group_size: int = 8, **evaluation: Any) -> Config:
    training = schema.TrainingTable(max_steps=max_steps, batch_size=batch_size, group_size=group_size)
    return Config(tables={"training": training, "eval": schema.EvalTable(**evaluation)})


def test_measured_times_are_given_apart() -> None:
    found = run_time(configured(every=5, examples=16, samples=2), TIMED)
    assert (found.training_s, found.evaluation_s) == (100.0, pytest.approx(3 * 32 * 4.0 / 32))
    assert found.total_s == pytest.approx(112.0)
    assert found.rows().keys() == {"training_time", "evaluation_time"}
    assert found.warning == ""
    none = run_time(configured(), TIMED)
    assert (none.evaluation, none.evaluation_s, none.total_s, none.warning) == ("", 0.0, 100.0, "")


def test_a_resumed_run_counts_the_steps_and_evaluations_that_are_left() -> None:
    found = run_time(configured(max_steps=10, every=3, examples=8, samples=4), TIMED, steps_done=9)
    assert (found.training_s, found.evaluation_s) == (10.0, 4.0)
    assert found.training == "1 step"
    assert found.evaluation.startswith("1 evaluation of")
    assert run_time(configured(examples=8), TIMED, steps_done=10).total_s == 0.0


SMALL = st.integers(1, 40)


RUNS = {"max_steps": st.integers(1, 300), "every": st.integers(0, 300), "examples": st.integers(0, 2000)}
SIZES = dict.fromkeys(("batch_size", "group_size", "samples"), SMALL)


@settings(max_examples=40)
@given(values=st.fixed_dictionaries(RUNS | SIZES), past=st.sampled_from([TIMED, Past()]))
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
    assert fix in run_time(configured(**values), TIMED).warning


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


CAMPAIGN = """
[training]
max_steps = 7
[campaign]
seeds = [1, 2, 3]
max_steps = 50
parallel = {parallel}
max_workers = {workers}
"""


def test_the_documented_campaign_by_hand() -> None:
    schedule = Schedule(conditions=5, seeds=8, max_steps=500, parallelism=1)
    assert schedule.runs == 40
    assert schedule.total_steps == 20_000
    assert schedule.seconds(500 * 45.0) == 900_000.0  # 250 hours, as on the RTX 4090 of the documentation
    assert Schedule(conditions=5, seeds=8, max_steps=500, parallelism=4).seconds(500 * 45.0) == 225_000.0


@pytest.mark.parametrize(
    ("parallel", "workers", "parallelism"), [("false", 4, 1), ("true", 4, 4), ("true", 0, 15), ("true", 99, 15)]
)
def test_a_campaign_runs_as_many_at_a_time_as_it_has_workers(
    parallel: str, workers: int, parallelism: int, load: Callable[..., Any]
) -> None:
    config, _ = load(CAMPAIGN.format(parallel=parallel, workers=workers))
    schedule = schedule_of(config)
    assert (schedule.conditions, schedule.seeds, schedule.max_steps) == (5, 3, 50)
    assert schedule.parallelism == parallelism


def test_a_campaign_without_steps_takes_those_of_training_and_a_run_is_one_run(load: Callable[..., Any]) -> None:
    text, plain = CAMPAIGN.format(parallel="false", workers=0), "[training]\nmax_steps = 7\n"
    assert schedule_of(load(text.replace("max_steps = 50\n", ""))[0]).max_steps == 7
    assert schedule_of(load(text, "--max-steps", "9")[0]).max_steps == 9
    # A variable about campaigns makes no campaign of a run.
    config, _ = load(plain, environ={"RETRAIN__CAMPAIGN__SEEDS": "[1, 2]"})
    assert schedule_of(config) == Schedule(conditions=1, seeds=1, max_steps=7, parallelism=1)


def test_the_devices_of_a_campaign_are_dealt_to_its_runs_and_split_none(load: Callable[..., Any]) -> None:
    devices = '[backend]\ndevices = "cpu,cpu"\n'
    assert workload_of(load(devices)[0]).samplers == 1
    assert workload_of(load(devices + CAMPAIGN.format(parallel="true", workers=2))[0]).samplers == 0
