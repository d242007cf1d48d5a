"""Sampling while training, one step ahead or several: which policy samples a step, its line, errors, and stops."""

import json
import os
import signal
import threading
import time

import pytest

from retrain.kernel.errors import BackendError, NonFiniteError, OutOfMemoryError, Problem
from tests.kit.overlapped import GENERATIONS, lines, outcome, steps
from tests.kit.shared import first_or_long, slow_or_long

STEPS, TIMEOUT_S = 7, 30
NO_EVAL = ("--eval-examples", "0")
EVALUATED = ("--eval-examples", "3", "--eval-every", "2")
AHEAD_AND_HALF = slow_or_long([(most, half) for most in (1, 2) for half in (0, 1)], (1, 0), (2, 1))


@pytest.fixture
def run_ahead(run_overlapped):
    """`run_ahead(2, "--seed", "2")`: a short run that samples up to two steps ahead; returns the command's result.

    One step ahead is the toy that overlaps by itself, any other number the toy that samples into a buffer.
    """

    def run(most, *arguments):
        buffered = ("--backend", "toy_buffered", "--max-staleness", str(most)) if most != 1 else ()
        return run_overlapped(*buffered, "--max-steps", str(STEPS), *(arguments or NO_EVAL))

    return run


@pytest.mark.parametrize("most", first_or_long([2, 3, 8, 1, 0]))
def test_step_s_is_sampled_with_the_policy_after_s_minus_n_steps(run_ahead, tmp_path, most):
    result = run_ahead(most)
    assert (result.code, result.err.count("error")) == (0, 0), result.err
    generations, found = lines(tmp_path / "logs/train", GENERATIONS), steps(tmp_path / "logs/train")
    assert [each["step"] for each in generations] == sorted(each["step"] for each in generations)
    versions = {(each["step"], each["policy_version"]) for each in generations}
    assert versions == {(step, max(0, step - most)) for step in range(STEPS)}
    assert [line["step"] for line in found] == list(range(STEPS))
    assert [line["toy_drawn"] for line in found] == [4] * STEPS
    if most:
        assert [line["staleness_max"] for line in found] == [min(step, most) for step in range(STEPS)]
        assert [line["staleness_mean"] for line in found] == [min(step, most) for step in range(STEPS)]


def test_both_halves_work_at_once_and_sampling_stays_in_the_main_thread(run_ahead, disturbed, tmp_path):
    meeting, threads = threading.Barrier(2, timeout=TIMEOUT_S), set()

    def meet(half):
        def here(backend, what):
            is_first = half == "sample" and backend.trained == 0 and (half, True) not in threads
            threads.add((half, threading.current_thread() is threading.main_thread()))
            is_last = half == "train" and what.step == STEPS - 1
            if not is_first and not is_last:
                meeting.wait()

        return here

    disturbed.train, disturbed.sample = meet("train"), meet("sample")
    assert run_ahead(1).code == 0
    assert threads == {("train", False), ("sample", True)}
    found = steps(tmp_path / "logs/train")
    assert [line["staleness_max"] for line in found] == [0, *[1] * (STEPS - 1)]
    assert all(line["overlap_time_s"] > 0.0 for line in found[:-1])
    assert found[-1]["overlap_time_s"] == found[-1]["sample_time_s"] == 0.0
    for line in found:
        assert 0.0 <= line["overlap_time_s"] <= line["train_time_s"] <= line["step_time_s"]
        assert line["trainer_idle_time_s"] == pytest.approx(line["step_time_s"] - line["train_time_s"])
        assert line["sampler_idle_time_s"] == pytest.approx(line["step_time_s"] - line["sample_time_s"])


def test_a_slow_batch_of_sampling_is_absorbed_by_those_in_stock(run_ahead, disturbed, tmp_path):
    """Step 4 is being sampled until step 3 is trained: the trainer continues with earlier samples."""
    trained, drawn = threading.Event(), []

    def sample(backend, requests):
        drawn.append(len(drawn))
        if drawn[-1] == 4:
            assert trained.wait(TIMEOUT_S)

    disturbed.sample = sample
    disturbed.train = lambda backend, batch: trained.set() if batch.step == 3 else None
    assert run_ahead(3).code == 0
    assert trained.is_set()
    assert [line["step"] for line in steps(tmp_path / "logs/train")] == list(range(STEPS))


def fail(disturbed, half, step, error):
    """Raise while a step trains (0), or while it is sampled (1)."""
    drawn = []

    def train(backend, batch):
        if batch.step == step:
            raise error

    def sample(backend, requests):
        drawn.append(len(drawn))
        if drawn[-1] == step:
            raise error

    setattr(disturbed, ("train", "sample")[half], (train, sample)[half])


@pytest.mark.parametrize(("most", "half"), AHEAD_AND_HALF)
def test_an_error_ends_the_run_at_its_own_step_and_is_reported_once(run_ahead, disturbed, tmp_path, most, half):
    fail(disturbed, half, 3, BackendError(Problem(what="the device is gone", fix="put it back")))
    result = run_ahead(most)
    assert (result.code, result.err.count("the device is gone")) == (1, 1)
    assert [line["step"] for line in steps(tmp_path / "logs/train")] == [0, 1, 2]
    assert len(lines(tmp_path / "logs/train", GENERATIONS)) == 3 * 4 * 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("training", "sampling"))]


@pytest.mark.parametrize(("most", "half"), AHEAD_AND_HALF)
def test_a_number_that_is_not_finite_rejects_its_own_step_which_changes_nothing(
    run_ahead, disturbed, tmp_path, most, half
):
    fail(disturbed, half, 2, NonFiniteError(Problem(what="the loss is nan", fix="lower lr")))
    assert run_ahead(most).code == 0
    found = steps(tmp_path / "logs/train")
    assert [line.get("rejected") for line in found] == [None, None, "the loss is nan", *[None] * 4]
    after = {1: [0, 1, 1, 1], 2: [1, 1, 2, 2]}[most]
    assert [line.get("staleness_max") for line in found] == [0, 1, (most, None)[half], *after]


@pytest.mark.parametrize("half", ["train", "sample"])
def test_out_of_memory_in_either_half_passes_over_no_prompt(run_overlapped, disturbed, tmp_path, half):
    """A step that does not fit is sampled again with fewer prompts, and what was sampled after it is discarded."""
    failed = []

    def once(backend, what):
        size = len(what) if half == "sample" else len(what.rows) // 8
        if not failed and backend.trained and size > 1:
            failed.append(size)
            raise OutOfMemoryError(Problem(what="out of memory", fix="less"))

    setattr(disturbed, half, once)
    result = run_overlapped(*NO_EVAL, "--bp-enabled", "true", "--bp-max-batch-size", "4")
    assert result.code == 0, result.err
    assert failed
    found = steps(tmp_path / "logs/train")
    assert [line["step"] for line in found] == list(range(5))
    drawn = [(each["step"], each["example_id"]) for each in lines(tmp_path / "logs/train", GENERATIONS)]
    examples = [example for _, example in dict.fromkeys(drawn)]
    state = json.loads((tmp_path / "logs/train/trainer_state.json").read_text())
    assert len(examples) == sum(line["batch_size"] for line in found) == state["example_idx"]
    assert len(set(examples[:12])) == min(12, len(examples))  # an epoch: none twice, none left out


STOPS = [(most, *place) for most in (2, 1) for place in (("sample", 1), ("train", 3), ("sample", 4))]


@pytest.mark.parametrize(("most", "half", "step"), slow_or_long(STOPS, (2, "train", 3)))
def test_a_stop_in_mid_flight_can_be_resumed_to_the_same_run(run_ahead, command, disturbed, tmp_path, most, half, step):
    """An update that is still under way when the run stops is not part of its checkpoint."""
    assert run_ahead(most, "--log-dir", "never", *EVALUATED).code == 0
    drawn = []

    def stop(backend, what):
        drawn.append(len(what.rows) if half == "train" else len(what))
        if (what.step if half == "train" else drawn.count(4) - 1) == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    setattr(disturbed, half, stop)
    result = run_ahead(most, "--log-dir", "stopped", "--grace-s", "60", *EVALUATED)
    assert result.code == 75, result.err
    assert not [thread for thread in threading.enumerate() if thread.name == "sampling"]
    disturbed.train = disturbed.sample = lambda backend, what: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 3])
def test_a_run_that_is_extended_is_the_longer_run(run_ahead, command, tmp_path, most):
    assert run_ahead(most, "--log-dir", "never", *NO_EVAL).code == 0
    assert run_ahead(most, "--log-dir", "longer", *NO_EVAL, "--max-steps", "4").code == 0
    state = json.loads((tmp_path / "longer/adapter/final/checkpoint.json").read_text())
    assert state["progress"]["versions"] == list(range(4 - most, 4))  # policies of the steps to come
    assert command("--resume", "longer", "--max-steps", str(STEPS)).code == 0
    assert outcome(tmp_path / "longer") == outcome(tmp_path / "never")


@pytest.mark.parametrize(
    ("backend", "most", "more", "told"),
    [
        ("toy", "1", (), "backend 'toy' can do at most 0"),
        ("toy_buffered", "9", (), "backend 'toy_buffered' can do at most 8"),
        ("toy_buffered", "2", ("--bp-enabled", "true"), "does not go with back pressure"),
    ],
)
def test_more_than_a_backend_can_do_is_refused_by_name(run_overlapped, backend, most, more, told):
    result = run_overlapped("--backend", backend, "--max-staleness", most, *more)
    assert result.code == 2
    assert told in result.err


@pytest.mark.long
def test_episodes_overlap_training_too(run_overlapped, command, disturbed, tmp_path):
    turns = ("--environment-provider", "toy_turns", "--eval-examples", "2", "--eval-every", "2")
    assert run_overlapped("--log-dir", "never", *turns).code == 0
    assert [line["staleness_max"] for line in steps(tmp_path / "never")] == [0, 1, 1, 1, 1]
    asked = []

    def stop(backend, requests):
        if backend.sampler.version == 2:
            asked.append(len(requests))
            if len(asked) == 2:  # in the middle of the episodes
                os.kill(os.getpid(), signal.SIGTERM)

    disturbed.sample = stop
    assert run_overlapped("--log-dir", "stopped", *turns).code == 75
    disturbed.sample = lambda backend, what: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")
