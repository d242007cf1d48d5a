"""Memory and time from past runs and by formula, and what a run measures: the same work counts, evaluations apart."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.tools import capacity
from retrain.tools.capacity import workload
from retrain.tools.capacity.advice import hint
from retrain.tools.capacity.forecast import Past, past_runs, run_time
from retrain.tools.capacity.watch import FEWEST_STEPS, RECENT_STEPS, CapacityWatch, Meter
from retrain.tools.capacity.workload import (
    Schedule,
    eval_completions_of,
    evaluations,
    schedule_of,
    workload_of,
)

HERE = {"machine": platform.machine(), "cores": os.cpu_count()}
MEASURED = {"median_step_time_s": 2.0, "peak_memory_bytes": 1000, "memory_at_start_bytes": 400}
Load = Callable[..., Any]


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
def history(load: Load, tmp_path: Path) -> History:
    return History(load("[training]\nbatch_size = 4\n")[0], tmp_path / "logs")


def test_the_median_of_the_same_work_is_taken(history: History) -> None:
    assert history.past == Past()
    for number, seconds in enumerate((1.0, 3.0, 50.0)):
        history.add(f"campaign/runs/{number}", measured=MEASURED | {"median_step_time_s": seconds})
    expected = Past(runs=3, median_step_time_s=3.0, peak_memory_bytes=1000, memory_at_start_bytes=400)
    assert history.past == expected


SAMPLED = {"time_shares": {"sample": 0.4}}
COSTS = [(SAMPLED, 0.4 * 2.0 / (4 * 16)), (SAMPLED | {"eval_completion_time_s": 0.005}, 0.005), ({}, None)]


@pytest.mark.parametrize(("further", "seconds"), [*COSTS, ({"time_shares": {"sample": "most"}}, None)])
def test_evaluations_cost_as_measured(further: dict[str, Any], seconds: float | None, history: History) -> None:
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


def test_what_is_from_elsewhere_no_number_damaged_or_a_circle_of_links_does_not_count(history: History) -> None:
    for number, hardware in enumerate((HERE | {"cores": -1}, None)):
        history.add(f"elsewhere{number}", hardware=hardware)
    for number, measured in enumerate((None, [], *(dict.fromkeys(MEASURED, bad) for bad in ("2", -1.0, True, 1e300)))):
        history.add(f"odd{number}", measured=measured)
    for number, text in enumerate(("", "[]", "null", '{"capacity": 3}', '{"capacity": {"measured": {}}}', "{" * 10**5)):
        history.write(f"bad{number}", text)
    found = history.past
    assert (found.median_step_time_s, found.peak_memory_bytes) == (None, None)
    history.add("good")
    (history.logs / "loop").symlink_to(history.logs, target_is_directory=True)
    found = history.past  # four odd ones did the same work
    assert (found.runs, found.median_step_time_s, found.peak_memory_bytes) == (5, 2.0, 1000)


TIMED = Past(runs=1, median_step_time_s=10.0, eval_completion_s=4.0 / 32)


def configured(*, max_steps: int = 10, batch_size: int = 4, group_size: int = 8, **evaluation: Any) -> Config:
    training = schema.TrainingTable(max_steps=max_steps, batch_size=batch_size, group_size=group_size)
    return Config(tables={"training": training, "eval": schema.EvalTable(**evaluation)})


def test_each_task_evaluates_its_own_held_out_examples() -> None:
    data = schema.DataTable(tasks=[{"name": "a", "held_out": 6}, {"name": "b"}, {"name": "c", "held_out": 0}])
    config = Config(tables={"eval": schema.EvalTable(examples=4, samples=2), "data": data})
    assert eval_completions_of(config) == (6 + 4) * 2


def test_measured_times_are_given_apart_and_a_resumed_run_counts_what_is_left() -> None:
    found = run_time(configured(every=5, examples=16, samples=2), TIMED)
    assert (found.training_s, found.evaluation_s) == (100.0, pytest.approx(3 * 32 * 4.0 / 32))
    assert found.total_s == pytest.approx(112.0)
    assert found.rows().keys() == {"training_time", "evaluation_time"}
    assert found.warning == ""
    none = run_time(configured(), TIMED)
    assert (none.evaluation, none.evaluation_s, none.total_s, none.warning) == ("", 0.0, 100.0, "")
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


def test_one_key_is_named_where_it_is_enough_and_without_a_measurement_completions_decide() -> None:
    for values, fix in (
        ({"every": 1, "examples": 64, "samples": 2}, "set [eval] every = 2"),
        ({"examples": 200, "samples": 4}, "set [eval] examples = 100"),
        ({"examples": 10, "samples": 64}, "set [eval] samples = 40"),
    ):
        assert fix in run_time(configured(**values), TIMED).warning
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


def test_a_campaign_runs_what_its_workers_can(load: Load) -> None:
    for parallel, workers, parallelism in (("false", 4, 1), ("true", 4, 4), ("true", 0, 15), ("true", 99, 15)):
        config, _ = load(CAMPAIGN.format(parallel=parallel, workers=workers))
        assert schedule_of(config) == Schedule(runs=15, max_steps=50, parallelism=parallelism)
    documented = Schedule(runs=40, max_steps=500, parallelism=1)
    assert documented.total_steps == 20_000
    assert documented.seconds(500 * 45.0) == 900_000.0  # 250 hours, as on the RTX 4090 of the documentation
    assert replace(documented, parallelism=4).seconds(500 * 45.0) == 225_000.0
    text, plain = CAMPAIGN.format(parallel="false", workers=0), "[training]\nmax_steps = 7\n"
    assert schedule_of(load(text.replace("max_steps = 50\n", ""))[0]).max_steps == 7
    assert schedule_of(load(text, "--max-steps", "9")[0]).max_steps == 9
    # A variable about campaigns makes no campaign of a run.
    config, _ = load(plain, environ={"RETRAIN__CAMPAIGN__SEEDS": "[1, 2]"})
    assert schedule_of(config) == Schedule(runs=1, max_steps=7, parallelism=1)
    # The devices of a campaign are dealt to its runs, and split none.
    devices = '[backend]\ndevices = "cpu,cpu"\n'
    assert workload_of(load(devices)[0]).samplers == 1
    assert workload_of(load(devices + CAMPAIGN.format(parallel="true", workers=2))[0]).samplers == 0


def with_engine(engine: str = "pytorch", backend: str = "local", **options: Any) -> Config:
    table = schema.BackendTable(backend=backend, devices="gpu:0", options=options)
    return Config(tables={"backend": table, "inference": InferenceTable(engine=engine)})


@pytest.mark.parametrize(
    ("shares", "config", "has_gpu", "said"),
    [
        ({"sample": 0.78}, with_engine(), True, "sampling 78% with engine = 'pytorch': try [inference] kv_cache_dtype"),
        ({"sample": 0.78}, with_engine(), False, ""),
        ({"sample": 0.78}, with_engine("vllm"), False, "try more servers in [inference] url"),
        ({"sample": 0.59, "train": 0.41}, with_engine(), True, ""),
        ({"sample": 0.9}, with_engine(backend="tinker"), True, ""),
        ({"train": 0.7}, with_engine(), True, ""),
        ({"score": 0.31, "sample": 0.6}, with_engine(backend="tinker"), False, "waiting for scores 31%: try [scoring]"),
        ({}, with_engine(), True, ""),
    ],
)
def test_the_key_of_the_main_phase(
    shares: dict[str, float], config: Config, has_gpu: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "gpu_memory_bytes", lambda: (2**34,) * has_gpu)
    text = hint(shares, config)
    assert (said in text, bool(text)) == (True, bool(said))


def test_shares_are_of_the_whole_step_and_without_the_first() -> None:
    meter = Meter()
    assert meter.shares == {}
    meter.step(100.0, {"sample": 100.0})
    assert meter.shares["sample"] == 1.0
    meter.step(10.0, {"sample": 2.0, "train": 7.0})
    meter.step(10.0, {"sample": 4.0, "train": 5.0})
    assert meter.shares == {"sample": 0.3, "score": 0.0, "train": 0.6}
    assert meter.measured()["time_shares"] == meter.shares


@pytest.mark.parametrize("steps", [FEWEST_STEPS - 1, FEWEST_STEPS])
def test_a_run_says_it_once_at_its_end(steps: int, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(config=with_engine("vllm"), folder=tmp_path)
    context: Any = SimpleNamespace(plugins=None)
    watch, other = capacity.retrain_watch_run(context), capacity.retrain_watch_run(context)
    assert isinstance(watch, CapacityWatch)
    assert isinstance(other, CapacityWatch)
    watch.retrain_run_start()
    other.retrain_run_start()  # of another run in this process, which keeps its own time
    for _ in range(steps):
        watch.retrain_step_end({"step_time_s": 1.0, "sample_time_s": 0.8, "score_time_s": 0.0, "train_time_s": 0.1})
    with caplog.at_level(logging.INFO, logger="retrain"):
        watch.retrain_run_end(run)
        other.retrain_run_end(run)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Time: ")]
    assert len(said) == (steps == FEWEST_STEPS)
    assert not said or "sampling 80% with engine = 'vllm'" in said[0]


BLOCK = 200 * 2**20
# In a process of its own: one that has run other tests would have to exceed their peak, which is gigabytes.
PEAKS = """
import json, sys
import numpy as np
from retrain.tools.capacity.watch import Meter, peak_bytes

meter = Meter()
first = peak_bytes()
meter.enter("sampling")
block = np.ones(peak_bytes() + int(sys.argv[1]), dtype=np.uint8)
meter.enter("training")
del block
meter.enter("recording")
json.dump(meter.measured() | {"first_peak": first}, sys.stdout, allow_nan=False)
"""


def test_a_phase_is_charged_with_the_peak_that_it_reached() -> None:
    parent = np.ones(2 * BLOCK, dtype=np.uint8)  # is not charged to its child
    command = [sys.executable, "-c", PEAKS, str(BLOCK)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 2**20 < measured["memory_at_start_bytes"] <= measured["first_peak"] < len(parent)
    phases = measured["peak_memory_bytes_by_phase"]
    assert phases["sampling"] >= phases.get("start", 0) + BLOCK // 2
    assert measured["peak_memory_bytes"] >= phases["sampling"]
    assert "training" not in phases
    assert "median_step_time_s" not in measured


def test_the_first_step_is_not_in_the_median_and_old_ones_are_forgotten() -> None:
    meter = Meter()
    meter.step(100.0)
    assert meter.measured()["median_step_time_s"] == 100.0
    meter.step(1.0)
    meter.step(3.0)
    assert meter.measured()["median_step_time_s"] == 2.0
    for _ in range(3 * RECENT_STEPS):
        meter.step(5.0)
    assert meter.measured()["steps"] == RECENT_STEPS
    meter.saw(20, 7)
    meter.saw(10, 9)
    measured = meter.measured()
    assert (measured["longest_prompt_tokens"], measured["longest_completion_tokens"]) == (20, 9)
