"""`retrain init` fits the run to the machine; its speed is given here, never measured."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.cli.start import first_run
from retrain.cli.start.first_run import Speed
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.registry import Plugins

pytestmark = pytest.mark.usefixtures("offline")
TINY = ("init", "--model", "builtin:tiny", "--data", "tasks.jsonl", "--reward", "match")
MEASURED_SPEED = first_run.measured_speed  # before the fixture replaces it
SUMS = [{"prompt": f"What is {n} + 30?", "answer": str(n + 30)} for n in range(200)]
SLOW = Speed(prefill_s=1e-3, decode_s=0.2, sample_s=0.02, train_s=0.02, start_s=20.0, prompt_tokens=40)


def test_a_slow_machine_gets_a_run_of_half_an_hour(
    command: Callable[..., Any], put: Callable[..., Path], tmp_path: Path, machine: SimpleNamespace
) -> None:
    put("tasks.jsonl", SUMS)
    machine.speed = SLOW
    told = json.loads(command(*TINY, "--json").out)["time"]
    assert told["is_measured"]
    assert "(measured)" in told["text"]
    assert told["first_step_s"] <= 180
    assert told["run_s"] <= 1800
    text = (tmp_path / "retrain.toml").read_text()
    assert told["text"] in text
    content = tomllib.loads(text)
    assert content["training"]["max_steps"] < 70
    assert content["eval"]["examples"] < 40


def test_a_fast_machine_keeps_the_sizes_of_the_model(tmp_path: Path, put: Callable[..., Path], command: Any) -> None:
    put("tasks.jsonl", SUMS)
    assert "on this machine (measured): training" in command(*TINY).out
    content = tomllib.loads((tmp_path / "retrain.toml").read_text())
    assert (content["training"]["max_steps"], content["eval"]) == (70, {"every": 20, "examples": 40})


def test_steps_of_the_user_stay(
    command: Callable[..., Any], put: Callable[..., Path], tmp_path: Path, machine: SimpleNamespace
) -> None:
    put("tasks.jsonl", SUMS)
    machine.speed = SLOW
    assert command(*TINY, "--max-steps", "33").code == 0
    assert tomllib.loads((tmp_path / "retrain.toml").read_text())["training"]["max_steps"] == 33


def test_a_pilot_that_fails_says_so_and_writes_the_usual_sizes(
    command: Callable[..., Any], put: Callable[..., Path], tmp_path: Path, machine: SimpleNamespace
) -> None:
    put("tasks.jsonl", SUMS)
    machine.speed = BackendError(Problem(where="capacity --pilot", what="the pilot failed", fix="-"))
    done = command(*TINY)
    assert done.code == 0
    assert "not measured, because the pilot failed" in done.out
    assert tomllib.loads((tmp_path / "retrain.toml").read_text())["training"]["max_steps"] == 70


@pytest.mark.slow
def test_a_model_that_is_here_is_measured(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "retrain.toml"
    file.write_text('[model]\nmodel = "builtin:tiny"\n[training]\nmax_tokens = 8\n')
    prompts = [list(range(40, 60 + n)) for n in range(4)]
    found = first_run.measure(str(file), prompts, plugins)
    assert found.pop("probes_s") > 0.0
    measured = Speed(start_s=0.0, **found)
    assert measured.train_s > 0.0
    assert 0.0 < measured.sampling_s(4, 16, 8) < 60.0
    assert measured.longest_tokens <= 8


def test_a_model_that_cannot_be_loaded_is_a_reason_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "retrain.toml"
    file.write_text('[model]\nmodel = "/nowhere/at/all"\n[nonsense]\n')
    with pytest.raises(BackendError) as caught:
        MEASURED_SPEED(file, ())
    assert caught.value.problems[0].what == "unknown table"
