"""The next step is drawn while this one is trained: what is drawn with what, who is told of what, and how it stops."""

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

from retrain.errors import BackendError, NonFiniteError, OutOfMemoryError, Problem

# Does what `act.json` says at the phase and step that it names, once.
ACTING = """
import json, os, signal
from pathlib import Path
from retrain.api import hookimpl

@hookimpl
def retrain_phase(run, step, phase):
    file = Path("act.json")
    wanted = json.loads(file.read_text()) if file.exists() else {}
    if wanted and (wanted["phase"], wanted["step"]) == (phase, step):
        file.unlink()
        if wanted["action"] == "raise":
            raise RuntimeError("broken")
        os.kill(os.getpid(), getattr(signal, wanted["action"]))
"""
PLACES = [("eval", -1), ("eval", 1), ("eval", 4), ("checkpoint", 2)]
PLACES += [(phase, step) for phase in ("sampling", "scoring", "training", "recording") for step in (0, 1, 2, 4)]
Command = Callable[..., Any]
Run = Callable[..., Any]
SOURCE = Path(__file__).parents[1] / "toys" / "toy_ahead.py"
STEPS = 5
TIMEOUT_S = 30


@pytest.fixture
def disturbed(toys: Path, distribution: Callable[..., Path]) -> Any:
    """Where the tests put what is to happen in either half."""
    distribution("retrain-ahead", {"toy_ahead": SOURCE.read_text(encoding="utf-8")})
    return importlib.import_module("toy_ahead").Disturbed


@pytest.fixture
def run(command: Command, disturbed: Any, tokenizer_folder: Path) -> Run:
    """`run("--seed", "2")`: a short run; returns the command's result."""
    base = [
        "--model",
        str(tokenizer_folder),
        "--backend",
        "toy_ahead",
        "--data-source",
        "toy",
        "--reward-type",
        "toy_wordy",
    ]
    base += ["--max-steps", str(STEPS), "--batch-size", "4", "--group-size", "8", "--max-tokens", "3", "--seed", "1"]
    base += ["--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll"]
    base += ["--data-instruction", "", "--temperature", "1.0", "--save-every", "0", "--scoring-audit", "off"]
    return lambda *arguments: command(*base, *arguments)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps, without the evaluation before training."""
    return [line for line in lines(folder) if line["step"] >= 0]


def outcome(folder: Path) -> tuple[Any, ...]:
    """All that a run leaves, time apart."""
    untimed = [{k: v for k, v in line.items() if not k.endswith("time_s")} for line in lines(folder)]
    final = (folder / "adapter/final/logits.json").read_bytes()
    return untimed, lines(folder, "emergence/generations.jsonl"), lines(folder, "emergence/steps.jsonl"), final


def test_a_step_is_drawn_with_the_policy_before_the_last_update(run: Run, tmp_path: Path) -> None:
    result = run("--eval-examples", "0")
    assert (result.code, result.err) == (0, "")
    found = steps(tmp_path / "logs/train")
    assert [line["staleness_mean"] for line in found] == [0, 1, 1, 1, 1]
    assert [line["staleness_max"] for line in found] == [0, 1, 1, 1, 1]
    generations = lines(tmp_path / "logs/train", "emergence/generations.jsonl")
    assert [each["step"] for each in generations] == sorted(each["step"] for each in generations)
    assert {(r["step"], r["policy_version"]) for r in generations} == {(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)}
    assert [line["toy_drawn"] for line in found] == [4] * STEPS
    for line in found:
        assert 0.0 <= line["overlap_time_s"] <= line["train_time_s"] <= line["step_time_s"]
        assert line["trainer_idle_time_s"] == pytest.approx(line["step_time_s"] - line["train_time_s"])
        assert line["sampler_idle_time_s"] == pytest.approx(line["step_time_s"] - line["sample_time_s"])


def test_both_halves_are_at_work_at_once_and_drawing_stays_in_the_main_thread(
    run: Run, disturbed: Any, tmp_path: Path
) -> None:
    meeting, threads = threading.Barrier(2, timeout=TIMEOUT_S), set()

    def meet(half: str) -> Callable[..., None]:
        def here(backend: Any, what: Any) -> None:
            is_first = half == "sample" and backend.trained == 0 and (half, True) not in threads
            threads.add((half, threading.current_thread() is threading.main_thread()))
            is_last = half == "train" and what.step == STEPS - 1
            if not is_first and not is_last:
                meeting.wait()

        return here

    disturbed.train, disturbed.sample = meet("train"), meet("sample")
    assert run("--eval-examples", "0").code == 0
    assert threads == {("train", False), ("sample", True)}
    found = steps(tmp_path / "logs/train")
    assert all(line["overlap_time_s"] > 0.0 for line in found[:-1])
    assert found[-1]["overlap_time_s"] == found[-1]["sample_time_s"] == 0.0


@pytest.mark.parametrize("slow", ["train", "sample"])
def test_who_is_faster_changes_nothing(run: Run, disturbed: Any, tmp_path: Path, slow: str) -> None:
    assert run("--log-dir", "plain", "--eval-examples", "2", "--eval-every", "2").code == 0
    setattr(disturbed, slow, lambda backend, what: time.sleep(0.05))
    assert run("--log-dir", "slow", "--eval-examples", "2", "--eval-every", "2").code == 0
    assert outcome(tmp_path / "slow") == outcome(tmp_path / "plain")


def test_an_evaluation_sees_the_policy_after_the_step_that_it_names(run: Run, disturbed: Any) -> None:
    versions = []

    def watch(backend: Any, requests: Any) -> None:
        if len(requests) == 3:
            versions.append(backend.sampler.version)

    disturbed.sample = watch
    assert run("--eval-examples", "3", "--eval-every", "2").code == 0
    assert versions == [0, 2, 4, 5]


def failing(step: int, error: Exception) -> tuple[Callable[..., None], Callable[..., None]]:
    """What fails in the training of a step, and what fails in its drawing."""
    drawn = []

    def train(backend: Any, batch: Any) -> None:
        if batch.step == step:
            raise error

    def sample(backend: Any, requests: Any) -> None:
        drawn.append(len(drawn))
        if drawn[-1] == step:
            raise error

    return train, sample


@pytest.mark.parametrize("half", [0, 1])
def test_an_error_ends_the_run_at_its_own_step_and_is_told_once(
    run: Run, disturbed: Any, tmp_path: Path, half: int
) -> None:
    error = BackendError(Problem(what="the device is gone", fix="put it back"))
    setattr(disturbed, ("train", "sample")[half], failing(2, error)[half])
    result = run("--eval-examples", "0")
    assert result.code == 1
    assert result.err.count("the device is gone") == 1
    assert [line["step"] for line in steps(tmp_path / "logs/train")] == [0, 1]
    assert len(lines(tmp_path / "logs/train", "emergence/generations.jsonl")) == 2 * 4 * 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("training")]


@pytest.mark.parametrize("half", [0, 1])
def test_a_number_that_is_not_finite_rejects_its_own_step_and_the_next_is_on_policy(
    run: Run, disturbed: Any, tmp_path: Path, half: int
) -> None:
    error = NonFiniteError(Problem(what="the loss is nan", fix="lower lr"))
    setattr(disturbed, ("train", "sample")[half], failing(2, error)[half])
    assert run("--eval-examples", "0").code == 0
    found = steps(tmp_path / "logs/train")
    assert [line.get("rejected") for line in found] == [None, None, "the loss is nan", None, None]
    assert [line.get("staleness_max") for line in found] == [0, 1, (1, None)[half], 0, 1]


def test_steps_that_teach_nothing_are_drawn_in_turn(run: Run, tmp_path: Path) -> None:
    assert run("--eval-examples", "0", "--reward-type", "toy_never").code == 0
    found = steps(tmp_path / "logs/train")
    assert [line["staleness_max"] for line in found] == [0] * STEPS
    assert [line["sample_time_s"] > 0.0 for line in found] == [True] * STEPS


def test_a_backend_that_takes_turns_knows_nothing_of_all_this(run: Run, tmp_path: Path) -> None:
    assert run("--eval-examples", "0", "--backend", "toy").code == 0
    fields = {name for line in steps(tmp_path / "logs/train") for name in line}
    assert not {name for name in fields if "stale" in name or "idle" in name or "overlap" in name}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("half", ["train", "sample"])
def test_a_stop_in_either_half_can_be_resumed_to_the_same_run(
    run: Run, command: Command, disturbed: Any, tmp_path: Path, half: str, after: bool
) -> None:
    """Before or `after` the other half has ended; the update of a training that goes on is not made."""
    arguments = ("--eval-examples", "2", "--eval-every", "2")
    assert run("--log-dir", "never", *arguments).code == 0
    sampled = threading.Event()

    def stop(backend: Any, what: Any) -> None:
        if half == "train" and what.step == 2:
            if after:
                sampled.wait(TIMEOUT_S)
                time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        if half == "sample" and backend.sampler.version == 2 and len(what) == 4:
            while after and backend.trained < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    def other(backend: Any, what: Any) -> None:
        if half == "train" and backend.sampler.version == 2:
            sampled.set()

    setattr(disturbed, half, stop)
    if half == "train":
        disturbed.sample = other
    result = run("--log-dir", "stopped", "--grace-s", "60", *arguments)
    assert result.code == 75, result.err
    (checkpoint,) = (tmp_path / "stopped/adapter").iterdir()
    steps_in_it = json.loads((checkpoint / "trained.json").read_text())
    before = json.loads((checkpoint / "before.json").read_text())
    assert before[0] == steps_in_it - 1
    if half == "train" or after:
        assert steps_in_it == (2 if half == "train" else 3)
    disturbed.train = disturbed.sample = lambda backend, what: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


def test_a_run_that_is_extended_is_the_longer_run(run: Run, command: Command, tmp_path: Path) -> None:
    assert run("--log-dir", "never", "--eval-examples", "0").code == 0
    assert run("--log-dir", "longer", "--eval-examples", "0", "--max-steps", "3").code == 0
    assert command("--resume", "longer", "--max-steps", str(STEPS)).code == 0
    assert outcome(tmp_path / "longer") == outcome(tmp_path / "never")


def test_the_same_seed_gives_the_same_run(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("--log-dir", name).code == 0
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    logits = json.loads((tmp_path / "a/adapter/final/logits.json").read_text())
    assert np.abs(logits).max() > 0.0


@pytest.mark.parametrize("action", ["SIGTERM", "raise"])
@pytest.mark.parametrize(("phase", "step"), PLACES)
def test_stopped_or_broken_in_any_phase_it_continues_as_the_same_run(
    run: Run, command: Command, distribution: Callable[..., Path], tmp_path: Path, phase: str, step: int, action: str
) -> None:
    distribution("retrain-acting", {"acting": ACTING})
    arguments = ("--eval-examples", "2", "--eval-every", "2", "--save-every", "2")
    assert run("--log-dir", "never", *arguments).code == 0
    (tmp_path / "act.json").write_text(json.dumps({"phase": phase, "step": step, "action": action}))
    result = run("--log-dir", "stopped", *arguments)
    assert result.code == (75 if action == "SIGTERM" else 1), result.err
    assert not (tmp_path / "act.json").exists()
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


def test_out_of_memory_in_either_half_passes_over_no_prompt(run: Run, disturbed: Any, tmp_path: Path) -> None:
    """A step that does not fit is drawn again with fewer prompts, and what had been drawn after it is given up."""
    failed = set()

    def once(half: str) -> Callable[..., None]:
        def fail(backend: Any, what: Any) -> None:
            if half not in failed and backend.trained == (1 if half == "train" else 2):
                failed.add(half)
                raise OutOfMemoryError(Problem(what="out of memory", fix="less"))

        return fail

    disturbed.train, disturbed.sample = once("train"), once("sample")
    result = run("--eval-examples", "0", "--bp-enabled", "true", "--bp-max-batch-size", "4")
    assert result.code == 0, result.err
    assert failed == {"train", "sample"}
    found = steps(tmp_path / "logs/train")
    assert [line["step"] for line in found] == list(range(STEPS))
    drawn = [
        (each["step"], each["example_id"]) for each in lines(tmp_path / "logs/train", "emergence/generations.jsonl")
    ]
    examples = [example for _, example in dict.fromkeys(drawn)]
    state = json.loads((tmp_path / "logs/train/trainer_state.json").read_text())
    assert len(examples) == sum(line["batch_size"] for line in found) == state["example_idx"]
    assert len(set(examples[:12])) == 12  # an epoch: none twice, none left out
