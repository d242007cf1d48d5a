"""Runs of toys with several updates per step or a schedule: their lines, stops and faults within a step, resumes."""

import importlib
import json
import os
import signal

import pytest

from retrain.kernel.errors import BackendError, NonFiniteError, Problem
from tests.kit.overlapped import GENERATIONS, lines, outcome, steps

MANY = ("--minibatches", "2", "--epochs", "2", "--eval-examples", "0")
COURSE = ("--optim-schedule", "cosine", "--optim-warmup-steps", "2", "--lr", "0.5", "--optim-min-lr-ratio", "0.2")


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["overlapped", "in turn"])
def overlaps(request, disturbed, monkeypatch):
    """Whether sampling overlaps training."""
    backend = importlib.import_module("toy_overlap").OverlappedBackend
    monkeypatch.setattr(backend, "overlaps_training", request.param)
    return bool(request.param)


def test_a_step_of_several_updates_publishes_once(run_overlapped, overlaps, tmp_path):
    assert run_overlapped(*MANY).code == 0
    found = steps(tmp_path / "logs/train")
    assert [line["updates"] for line in found] == [4] * 5
    assert [len(line["clip_fraction_updates"]) for line in found] == [4] * 5
    versions = {(each["step"], each["policy_version"]) for each in lines(tmp_path / "logs/train", GENERATIONS)}
    if overlaps:
        assert [line["staleness_max"] for line in found] == [0, 4, 4, 4, 4]
        assert versions == {(0, 0), (1, 0), (2, 4), (3, 8), (4, 12)}
    else:
        assert versions == {(step, 4 * step) for step in range(5)}


def test_a_stop_within_a_step_lets_it_end_and_resumes_as_the_same_run(
    run_overlapped, command, disturbed, overlaps, tmp_path
):
    arguments = (*MANY, *COURSE)
    assert run_overlapped("--log-dir", "never", *arguments).code == 0

    def stop(backend, batch):
        if (batch.step, batch.update) == (2, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    disturbed.train = stop
    result = run_overlapped("--log-dir", "stopped", *arguments)
    assert result.code == 75, result.err
    (checkpoint,) = (tmp_path / "stopped/adapter").iterdir()
    assert checkpoint.name == "checkpoint_step_3"
    assert json.loads((checkpoint / "trained.json").read_text()) == 12
    disturbed.train = lambda backend, batch: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


def test_a_run_broken_within_a_step_repeats_it(run_overlapped, command, disturbed, overlaps, tmp_path):
    arguments = (*MANY, *COURSE, "--save-every", "2")
    assert run_overlapped("--log-dir", "never", *arguments).code == 0

    def fail(backend, batch):
        if (batch.step, batch.update) == (3, 2):
            raise BackendError(Problem(what="the device is gone"))

    disturbed.train = fail
    assert run_overlapped("--log-dir", "broken", *arguments).code == 1
    disturbed.train = lambda backend, batch: None
    assert command("--resume", "broken").code == 0
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "never")


def test_an_update_that_is_not_finite_ends_its_step_and_says_so(run_overlapped, disturbed, overlaps, tmp_path):
    def fail(backend, batch):
        if (batch.step, batch.update) in ((1, 0), (3, 2)):
            raise NonFiniteError(Problem(what="the loss is nan"))

    disturbed.train = fail
    assert run_overlapped(*MANY).code == 0
    found = steps(tmp_path / "logs/train")
    wanted = [None, "the loss is nan", None, "update 3 of 4: the loss is nan", None]
    assert [line.get("rejected") for line in found] == wanted
    assert [line["updates"] for line in found] == [4, 0, 4, 2, 4]
    assert [line["loss"] for line in found] == [0.0, None, 0.0, 0.0, 0.0]
    (checkpoint,) = (tmp_path / "logs/train/adapter").iterdir()
    assert json.loads((checkpoint / "trained.json").read_text()) == 14
    last = {each["policy_version"] for each in lines(tmp_path / "logs/train", GENERATIONS) if each["step"] == 4}
    assert last == ({8} if overlaps else {10})  # what the step had done by then is published


def test_the_rate_of_each_step_is_in_its_line(run_overlapped, overlaps, tmp_path):
    result = run_overlapped("--eval-examples", "0", *COURSE)
    assert result.code == 0, result.err
    # 0.5 (f 0.8 + 0.2) with f = 1/2, 1, 1, 3/4, 1/4 of a cosine over the three steps after the warm-up
    assert [line["lr"] for line in steps(tmp_path / "logs/train")] == pytest.approx([0.3, 0.5, 0.5, 0.4, 0.2])
    result = run_overlapped("--eval-examples", "0", "--log-dir", "plain")
    assert result.code == 0, result.err
    assert not [line for line in steps(tmp_path / "plain") if "lr" in line]  # the toy reports none of its own


@pytest.mark.long
def test_the_length_of_a_falling_rate_is_fixed(run_overlapped, command, tmp_path):
    assert run_overlapped("--eval-examples", "0", *COURSE, "--max-steps", "2").code == 0
    result = command("--resume", "logs/train", "--max-steps", "3")
    assert result.code == 2
    assert "training.max_steps was 2 and is now 3" in result.err
    assert (
        "with schedule = 'cosine' the learning rate of every step depends on it, including the steps already taken"
        in result.err
    )
    assert command("--resume", "logs/train", "--max-steps", "3", "--resume-anyway").code == 0
    assert len(steps(tmp_path / "logs/train")) == 3
    warm = ("--eval-examples", "0", "--optim-warmup-steps", "2", "--log-dir", "warm")
    assert run_overlapped(*warm, "--max-steps", "2").code == 0
    assert command("--resume", "warm", "--max-steps", "3").code == 0  # the steps behind keep their rates
