"""Wall time by the formulas of the documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrain.tools.capacity.workload import Schedule, schedule_of, workload_of

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
