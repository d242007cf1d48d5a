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
