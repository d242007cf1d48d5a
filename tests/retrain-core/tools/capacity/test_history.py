"""Past runs: the same work on this machine counts, anything else and anything damaged does not."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.config.resolved import Config
from retrain.tools.capacity.forecast import Past, past_runs

HERE = {"machine": platform.machine(), "cores": os.cpu_count()}
MEASURED = {"median_step_time_s": 2.0, "peak_memory_bytes": 1000, "memory_at_start_bytes": 400}


@pytest.fixture
def config(load: Callable[..., Any]) -> Config:
    found: Config = load("[training]\nbatch_size = 4\n")[0]
    return found


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def add(config: Config, logs: Path) -> Callable[..., None]:
    """`add("a/b", training={"batch_size": 9}, measured={...}, hardware={...})`: a run folder."""

    def write(name: str, *, measured: Any = MEASURED, hardware: Any = HERE, **tables: dict[str, Any]) -> None:
        values = config.as_dict()
        for table, changes in tables.items():
            values[table] = {key: value for key, value in (values[table] | changes).items() if value is not None}
        folder = logs / name
        folder.mkdir(parents=True)
        content = {"config": values, "hardware": hardware, "capacity": {"measured": measured}}
        (folder / "run.json").write_text(json.dumps(content))

    return write


def test_without_runs_nothing_is_known(config: Config, logs: Path) -> None:
    assert past_runs(config, logs) == Past()


def test_the_median_of_the_same_work_is_taken(config: Config, logs: Path, add: Callable[..., None]) -> None:
    for number, seconds in enumerate((1.0, 3.0, 50.0)):
        add(f"campaign/runs/{number}", measured=MEASURED | {"median_step_time_s": seconds})
    found = past_runs(config, logs)
    assert found == Past(runs=3, median_step_time_s=3.0, peak_memory_bytes=1000, memory_at_start_bytes=400)


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
    further: dict[str, Any], seconds: float | None, config: Config, logs: Path, add: Callable[..., None]
) -> None:
    add("a", measured=MEASURED | further)
    assert past_runs(config, logs).eval_completion_s == (seconds and pytest.approx(seconds))


def test_other_work_says_only_what_an_idle_process_needs(config: Config, logs: Path, add: Callable[..., None]) -> None:
    add("a", training={"batch_size": 9})
    add("b", training={"lr": 0.5})  # changes neither time nor memory
    found = past_runs(config, logs)
    assert (found.runs, found.median_step_time_s, found.memory_at_start_bytes) == (1, 2.0, 400)
    add("bf16", model={"dtype": "bf16"})
    assert past_runs(config, logs).runs == 1
    found = past_runs(config, logs)
    add("c", model={"model": "other"}, measured=MEASURED | {"memory_at_start_bytes": 10**9})
    assert past_runs(config, logs) == found


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
def test_what_is_from_elsewhere_or_no_number_does_not_count(
    changes: dict[str, Any], config: Config, logs: Path, add: Callable[..., None]
) -> None:
    add("a", **changes)
    found = past_runs(config, logs)
    assert (found.median_step_time_s, found.peak_memory_bytes) == (None, None)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"capacity": 3}', '{"capacity": {"measured": {}}}', "{" * 10**5])
def test_a_damaged_manifest_is_passed_over(text: str, config: Config, logs: Path, add: Callable[..., None]) -> None:
    add("good")
    (logs / "bad").mkdir()
    (logs / "bad" / "run.json").write_text(text)
    assert past_runs(config, logs).runs == 1


def test_a_circle_of_links_ends(config: Config, logs: Path, add: Callable[..., None]) -> None:
    add("good")
    (logs / "loop").symlink_to(logs, target_is_directory=True)
    assert past_runs(config, logs).runs == 1
