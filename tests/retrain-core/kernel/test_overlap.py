"""Overlap: which policy samples a step while another trains, what its line reports, and how it stops."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import BackendError, NonFiniteError, OutOfMemoryError, Problem
from tests.kit.overlapped import GENERATIONS, lines, outcome, steps
from tests.kit.shared import first_or_long

Command = Callable[..., Any]
Run = Callable[..., Any]
STEPS = 5
TIMEOUT_S = 30


def test_a_step_is_sampled_with_the_policy_before_the_last_update(run_overlapped: Run, tmp_path: Path) -> None:
    result = run_overlapped("--eval-examples", "0")
    assert (result.code, result.err) == (0, "")
    found = steps(tmp_path / "logs/train")
    assert [line["staleness_mean"] for line in found] == [0, 1, 1, 1, 1]
    assert [line["staleness_max"] for line in found] == [0, 1, 1, 1, 1]
    generations = lines(tmp_path / "logs/train", GENERATIONS)
    assert [each["step"] for each in generations] == sorted(each["step"] for each in generations)
    assert {(r["step"], r["policy_version"]) for r in generations} == {(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)}
    assert [line["toy_drawn"] for line in found] == [4] * STEPS
    for line in found:
        assert 0.0 <= line["overlap_time_s"] <= line["train_time_s"] <= line["step_time_s"]
        assert line["trainer_idle_time_s"] == pytest.approx(line["step_time_s"] - line["train_time_s"])
        assert line["sampler_idle_time_s"] == pytest.approx(line["step_time_s"] - line["sample_time_s"])


def test_both_halves_work_at_once_and_sampling_stays_in_the_main_thread(
    run_overlapped: Run, disturbed: Any, tmp_path: Path
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
    assert run_overlapped("--eval-examples", "0").code == 0
    assert threads == {("train", False), ("sample", True)}
    found = steps(tmp_path / "logs/train")
    assert all(line["overlap_time_s"] > 0.0 for line in found[:-1])
    assert found[-1]["overlap_time_s"] == found[-1]["sample_time_s"] == 0.0


@pytest.mark.parametrize("slow", first_or_long(["train", "sample"]))
def test_whichever_half_is_faster_changes_nothing(
    run_overlapped: Run, disturbed: Any, tmp_path: Path, slow: str
) -> None:
    assert run_overlapped("--log-dir", "plain", "--eval-examples", "2", "--eval-every", "2").code == 0
    setattr(disturbed, slow, lambda backend, what: time.sleep(0.05))
    assert run_overlapped("--log-dir", "slow", "--eval-examples", "2", "--eval-every", "2").code == 0
    assert outcome(tmp_path / "slow") == outcome(tmp_path / "plain")


def test_an_evaluation_sees_the_policy_after_the_step_that_it_names(run_overlapped: Run, disturbed: Any) -> None:
    versions = []

    def watch(backend: Any, requests: Any) -> None:
        if len(requests) == 3:
            versions.append(backend.sampler.version)

    disturbed.sample = watch
    assert run_overlapped("--eval-examples", "3", "--eval-every", "2").code == 0
    assert versions == [0, 2, 4, 5]


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
def test_an_error_ends_the_run_at_its_own_step_and_is_reported_once(
    run_overlapped: Run, disturbed: Any, tmp_path: Path, half: int
) -> None:
    error = BackendError(Problem(what="the device is gone", fix="put it back"))
    setattr(disturbed, ("train", "sample")[half], failing(2, error)[half])
    result = run_overlapped("--eval-examples", "0")
    assert result.code == 1
    assert result.err.count("the device is gone") == 1
    assert [line["step"] for line in steps(tmp_path / "logs/train")] == [0, 1]
    assert len(lines(tmp_path / "logs/train", GENERATIONS)) == 2 * 4 * 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("training")]


@pytest.mark.parametrize("half", first_or_long([0, 1]))
def test_a_number_that_is_not_finite_rejects_its_own_step_and_the_next_is_on_policy(
    run_overlapped: Run, disturbed: Any, tmp_path: Path, half: int
) -> None:
    error = NonFiniteError(Problem(what="the loss is nan", fix="lower lr"))
    setattr(disturbed, ("train", "sample")[half], failing(2, error)[half])
    assert run_overlapped("--eval-examples", "0").code == 0
    found = steps(tmp_path / "logs/train")
    assert [line.get("rejected") for line in found] == [None, None, "the loss is nan", None, None]
    assert [line.get("staleness_max") for line in found] == [0, 1, (1, None)[half], 0, 1]


def test_steps_without_informative_groups_are_sampled_in_turn(run_overlapped: Run, tmp_path: Path) -> None:
    assert run_overlapped("--eval-examples", "0", "--reward-type", "toy_never").code == 0
    found = steps(tmp_path / "logs/train")
    assert [line["staleness_max"] for line in found] == [0] * STEPS
    assert [line["sample_time_s"] > 0.0 for line in found] == [True] * STEPS


def test_a_backend_that_takes_turns_is_unaffected_by_overlap(run_overlapped: Run, tmp_path: Path) -> None:
    assert run_overlapped("--eval-examples", "0", "--backend", "toy").code == 0
    fields = {name for line in steps(tmp_path / "logs/train") for name in line}
    assert not {name for name in fields if "stale" in name or "idle" in name or "overlap" in name}


@pytest.mark.long
def test_the_same_seed_gives_the_same_run(run_overlapped: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run_overlapped("--log-dir", name).code == 0
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    logits = json.loads((tmp_path / "a/adapter/final/logits.json").read_text())
    assert np.abs(logits).max() > 0.0


@pytest.mark.parametrize("half", ["train", "sample"])
def test_out_of_memory_in_either_half_passes_over_no_prompt(
    run_overlapped: Run, disturbed: Any, tmp_path: Path, half: str
) -> None:
    """A step that does not fit is sampled again with fewer prompts, and what was sampled after it is discarded."""
    failed = []

    def once(backend: Any, what: Any) -> None:
        size = len(what) if half == "sample" else len(what.rows) // 8
        if not failed and backend.trained and size > 1:
            failed.append(size)
            raise OutOfMemoryError(Problem(what="out of memory", fix="less"))

    setattr(disturbed, half, once)
    result = run_overlapped("--eval-examples", "0", "--bp-enabled", "true", "--bp-max-batch-size", "4")
    assert result.code == 0, result.err
    assert failed
    found = steps(tmp_path / "logs/train")
    assert [line["step"] for line in found] == list(range(STEPS))
    drawn = [(each["step"], each["example_id"]) for each in lines(tmp_path / "logs/train", GENERATIONS)]
    examples = [example for _, example in dict.fromkeys(drawn)]
    state = json.loads((tmp_path / "logs/train/trainer_state.json").read_text())
    assert len(examples) == sum(line["batch_size"] for line in found) == state["example_idx"]
    assert len(set(examples[:12])) == min(12, len(examples))  # an epoch: none twice, none left out
