"""Sampling several steps ahead: which policy samples a step, whatever the speed of either half, and how it stops."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import BackendError, NonFiniteError, Problem
from tests.kit.overlapped import GENERATIONS, lines, outcome, steps
from tests.kit.shared import first_or_long

Command = Callable[..., Any]
Run = Callable[..., Any]
STEPS, TIMEOUT_S = 7, 30


@pytest.fixture
def run_ahead(run_overlapped: Run) -> Run:
    """`run_ahead(2, "--seed", "2")`: a short run that samples up to two steps ahead; returns the command's result."""

    def run(most: int, *arguments: str) -> Any:
        fixed = ("--backend", "toy_buffered", "--max-staleness", str(most), "--max-steps", str(STEPS))
        return run_overlapped(
            *fixed, *(arguments if "--eval-examples" in arguments else ("--eval-examples", "0", *arguments))
        )

    return run


def versions(folder: Path) -> set[tuple[int, int]]:
    return {(each["step"], each["policy_version"]) for each in lines(folder, GENERATIONS)}


@pytest.mark.parametrize("most", first_or_long([2, 3, 8]))
def test_step_s_is_sampled_with_the_policy_after_s_minus_n_steps(run_ahead: Run, tmp_path: Path, most: int) -> None:
    result = run_ahead(most)
    assert (result.code, result.err.count("error")) == (0, 0), result.err
    assert versions(tmp_path / "logs/train") == {(step, max(0, step - most)) for step in range(STEPS)}
    found = steps(tmp_path / "logs/train")
    assert [line["step"] for line in found] == list(range(STEPS))
    assert [line["staleness_max"] for line in found] == [min(step, most) for step in range(STEPS)]
    assert [line["toy_drawn"] for line in found] == [4] * STEPS


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", first_or_long([0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
)
def test_speeds_change_nothing(run_ahead: Run, disturbed: Any, tmp_path: Path, seed: int) -> None:
    """Delays of each half drawn at random: the same completions, versions, metrics and policy as without any."""
    delays, most = np.random.default_rng(seed), (2, 3, 5, 2)[seed]
    evaluated = ("--eval-examples", "3", "--eval-every", "2")
    assert run_ahead(most, "--log-dir", "plain", *evaluated).code == 0
    for half in ("train", "sample"):
        setattr(disturbed, half, lambda backend, what: time.sleep(delays.choice([0.0, 0.0, 0.01, 0.05])))
    assert run_ahead(most, "--log-dir", "slow", *evaluated).code == 0
    assert outcome(tmp_path / "slow") == outcome(tmp_path / "plain")


def test_a_slow_batch_of_sampling_is_absorbed_by_those_in_stock(run_ahead: Run, disturbed: Any, tmp_path: Path) -> None:
    """Step 4 is being sampled until step 3 is trained: the trainer goes on with what was sampled before."""
    trained, drawn = threading.Event(), []

    def sample(backend: Any, requests: Any) -> None:
        drawn.append(len(drawn))
        if drawn[-1] == 4:
            assert trained.wait(TIMEOUT_S)

    disturbed.sample = sample
    disturbed.train = lambda backend, batch: trained.set() if batch.step == 3 else None
    assert run_ahead(3).code == 0
    assert trained.is_set()
    assert [line["step"] for line in steps(tmp_path / "logs/train")] == list(range(STEPS))


def test_an_evaluation_sees_the_policy_after_the_step_that_it_names(run_ahead: Run, disturbed: Any) -> None:
    seen = []

    def watch(backend: Any, requests: Any) -> None:
        if len(requests) == 3:
            seen.append((backend.sampler.version, threading.current_thread() is threading.main_thread()))

    disturbed.sample = watch
    assert run_ahead(3, "--eval-examples", "3", "--eval-every", "2").code == 0
    assert seen == [(version, True) for version in (0, 2, 4, 6, 7)]


def failing(step: int, error: Exception) -> tuple[Callable[..., None], Callable[..., None]]:
    """What fails while a step trains, and what fails while it is sampled."""
    drawn = []

    def train(backend: Any, batch: Any) -> None:
        if batch.step == step:
            raise error

    def sample(backend: Any, requests: Any) -> None:
        drawn.append(len(drawn))
        if drawn[-1] == step:
            raise error

    return train, sample


@pytest.mark.parametrize("half", first_or_long([0, 1]))
def test_an_error_ends_the_run_at_its_own_step(run_ahead: Run, disturbed: Any, tmp_path: Path, half: int) -> None:
    error = BackendError(Problem(what="the device is gone", fix="put it back"))
    setattr(disturbed, ("train", "sample")[half], failing(3, error)[half])
    result = run_ahead(2)
    assert (result.code, result.err.count("the device is gone")) == (1, 1)
    assert [line["step"] for line in steps(tmp_path / "logs/train")] == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name == "sampling"]


@pytest.mark.parametrize("half", first_or_long([0, 1]))
def test_a_rejected_step_counts_as_one_that_changed_nothing(
    run_ahead: Run, disturbed: Any, tmp_path: Path, half: int
) -> None:
    error = NonFiniteError(Problem(what="the loss is nan", fix="lower lr"))
    setattr(disturbed, ("train", "sample")[half], failing(2, error)[half])
    assert run_ahead(2).code == 0
    found = steps(tmp_path / "logs/train")
    assert [line.get("rejected") for line in found] == [None, None, "the loss is nan", None, None, None, None]
    assert [line.get("staleness_max") for line in found] == [0, 1, (2, None)[half], 1, 1, 2, 2]


@pytest.mark.long
def test_steps_that_teach_nothing_are_sampled_ahead_too(run_ahead: Run, tmp_path: Path) -> None:
    assert run_ahead(2, "--reward-type", "toy_never").code == 0
    found = steps(tmp_path / "logs/train")
    assert [(line["step"], line["staleness_max"]) for line in found] == [(step, 0) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("half", "step"), first_or_long([("train", 3), ("sample", 4), pytest.param("sample", 1, marks=pytest.mark.slow)])
)
def test_a_stop_in_mid_flight_can_be_resumed_to_the_same_run(
    run_ahead: Run, command: Command, disturbed: Any, tmp_path: Path, half: str, step: int
) -> None:
    evaluated = ("--eval-examples", "2", "--eval-every", "2")
    assert run_ahead(2, "--log-dir", "never", *evaluated).code == 0
    drawn: list[int] = []

    def stop(backend: Any, what: Any) -> None:
        drawn.append(len(what.rows) if half == "train" else len(what))
        if (what.step if half == "train" else drawn.count(4) - 1) == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    setattr(disturbed, half, stop)
    result = run_ahead(2, "--log-dir", "stopped", "--grace-s", "60", *evaluated)
    assert result.code == 75, result.err
    assert not [thread for thread in threading.enumerate() if thread.name == "sampling"]
    disturbed.train = disturbed.sample = lambda backend, what: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


@pytest.mark.long
def test_a_checkpoint_names_the_policies_of_the_steps_to_come(run_ahead: Run, command: Command, tmp_path: Path) -> None:
    assert run_ahead(3, "--log-dir", "never").code == 0
    assert run_ahead(3, "--log-dir", "longer", "--max-steps", "4").code == 0
    state = json.loads((tmp_path / "longer/adapter/final/checkpoint.json").read_text())
    assert state["progress"]["versions"] == [1, 2, 3]
    assert command("--resume", "longer", "--max-steps", str(STEPS)).code == 0
    assert outcome(tmp_path / "longer") == outcome(tmp_path / "never")


def test_phases_come_from_the_thread_of_the_run_alone(
    run_ahead: Run, distribution: Callable[..., Path], tmp_path: Path
) -> None:
    watcher = (
        "from threading import current_thread\nfrom retrain.api import Watcher, hookimpl\nSEEN = []\n\n"
        "class Phases(Watcher):\n    def phase(self, step, phase):\n"
        "        SEEN.append((current_thread().name, phase))\n"
        "\n@hookimpl\ndef retrain_watch_run(context):\n    return Phases()\n"
    )
    distribution("retrain-phases", {"phases": watcher})
    assert run_ahead(2).code == 0
    seen = importlib.import_module("phases").SEEN
    assert {thread for thread, _ in seen} == {threading.main_thread().name}
    assert [phase for _, phase in seen].count("training") == STEPS


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--backend", "toy", "--max-staleness", "1"), "backend 'toy' can do at most 0"),
        (("--backend", "toy_buffered", "--max-staleness", "9"), "backend 'toy_buffered' can do at most 8"),
        (
            ("--backend", "toy_buffered", "--max-staleness", "2", "--bp-enabled", "true"),
            "does not go with back pressure",
        ),
    ],
)
def test_more_than_a_backend_can_do_is_refused_by_name(
    run_overlapped: Run, arguments: tuple[str, ...], told: str
) -> None:
    result = run_overlapped(*arguments)
    assert result.code == 2
    assert told in result.err


@pytest.mark.parametrize("most", first_or_long([0, 1]))
def test_in_turn_and_one_step_ahead(run_ahead: Run, tmp_path: Path, most: int) -> None:
    assert run_ahead(most).code == 0
    assert versions(tmp_path / "logs/train") == {(step, max(0, step - most)) for step in range(STEPS)}


def test_explain_says_what_corrects(run_ahead: Run, command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[training]\nmax_staleness = 2\n[backend]\nbackend = 'toy_buffered'\n")
    assert "nothing bounds it: set [algorithm] is_bounds" in command("explain", "a.toml").out.replace("\n", " ")
