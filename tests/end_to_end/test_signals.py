"""A signal in any phase, in turn or on split devices: a checkpoint, exit code 75, and the same run in the end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.killing import (
    BASE,
    check_chains_of_kills,
    check_nothing_is_half_written,
    check_same,
    complete,
    finish,
    left_alone,
    start,
    waiting,
)
from tests.end_to_end.running import records
from tests.kit.shared import slow_or_long

pytestmark = pytest.mark.timeout(900)

STEP = 3
CASES = [
    *(("sampling", "SIGTERM"), ("sampling", "SIGINT"), ("sampling", "SIGUSR1"), ("scoring", "SIGTERM")),
    *(("training", "SIGTERM"), ("training", "SIGINT"), ("eval", "SIGTERM"), ("eval", "SIGUSR1")),
]
# The run tells that it has entered the phase and waits inside of it, in the work of that phase, for the signal.
WAIT_IN_PHASE = """
from retrain.kernel.parts import Run
from retrain.tasks import rollout
from retrain.tasks.scoring.service import ScoringBatch
from retrain_local.training.trainer import Trainer

def wait(*_):
    Path({mark!r}).touch()
    for _ in range(40):
        time.sleep(0.05)  # training is shielded: there the signal is noticed after this

entered = [None]
is_time = nth(1, lambda *_: entered[-1] == ({step}, {phase!r}))
at(Run, "enter", lambda run, step, phase: entered.append((step, phase)))
owner, name = {
    "scoring": (ScoringBatch, "collect"), "training": (Trainer, "accumulate")
}.get({phase!r}, (rollout, "draw_samples"))
at(owner, name, wait, is_time)
"""
# As above, in a place where Python can do nothing: the checkpoint is never written.
HANG = """
import threading
from retrain.run.run_records import RunRecords
def hang(*_):
    Path({mark!r}).touch()
    threading.Event().wait(60)
at(RunRecords, "save", hang, lambda records, name, metrics: name == "checkpoint_step_3")
"""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_alone(tmp_path_factory, "six-steps", *BASE)


@pytest.mark.parametrize(("phase", "name"), slow_or_long(CASES, ("training", "SIGTERM")))
def test_a_signal_in_any_phase_leaves_a_checkpoint_and_the_resumed_run_is_the_same(
    phase: str, name: str, work: Path
) -> None:
    run = work / f"{phase}-{name}"
    patch = WAIT_IN_PHASE.replace("{phase!r}", repr(phase)).replace("{step}", str(STEP))
    # no checkpoint of its own before: what is there afterwards is what the signal left
    more = ("--log-dir", str(run), "--save-every", "0", "--grace-s", "20")
    process = waiting(*BASE, *more, cwd=work, patch=patch, mark=work / f"{run.name}.mark")
    process.send_signal(getattr(signal, name))
    code, _, err = finish(process)
    assert code == 75, (phase, name, err)
    assert f"stopped by {name}" in err
    assert "--resume" in err
    check_nothing_is_half_written(run)
    (checkpoint,) = (run / "adapter").glob("*/checkpoint.json")
    assert json.loads(checkpoint.read_text())["next_step"] == STEP
    manifest = json.loads((run / "run.json").read_text())
    assert (manifest["status"], manifest["reason"]) == ("stopped", name)
    assert not (run / "adapter/final").exists()
    code, _, err = finish(start("--resume", str(run), cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


@pytest.mark.parametrize(
    ("patch", "grace_s", "code", "said"),
    [
        pytest.param(HANG, "60", 75, "second request (SIGINT): leaving at once", marks=pytest.mark.slow),
        pytest.param(HANG, "0.5", 75, "not stopped within 0.5 s", marks=pytest.mark.long),
        # before there is a checkpoint it is a failure; the resume begins again with its own seed
        pytest.param(HANG.replace("step_3", "step_1"), "0.5", 1, "", marks=pytest.mark.long),
    ],
    ids=["a second signal", "the grace period", "no checkpoint"],
)
def test_a_write_that_hangs_is_left_and_the_last_checkpoint_is_whole(
    patch: str, grace_s: str, code: int, said: str, work: Path, request: pytest.FixtureRequest
) -> None:
    run = work / request.node.callspec.id.replace(" ", "-")
    more = ("--log-dir", str(run), "--grace-s", grace_s)
    process = waiting(*BASE, *more, cwd=work, patch=patch, mark=work / f"{run.name}.mark")
    process.send_signal(signal.SIGTERM)  # heard, and waits for the end of the write that hangs
    if "second" in said:
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    found, _, err = finish(process)
    assert found == code, err
    assert said in err
    check_nothing_is_half_written(run)
    assert code == 1 or (run / "adapter/checkpoint_step_2").exists()
    assert finish(start("--resume", str(run), cwd=work))[0] == 0
    check_same(run, work / "never")


SPLIT = (*BASE, "--devices", "cpu,cpu")

# Step 3 is trained while step 4 is drawn. The run tells that it has come to a place and waits there for the signal.
WAIT_AT_PLACE = """
from retrain.run.steps.overlapped import Overlapped
from retrain.kernel.run import Trainer as Loop
from retrain.tasks import rollout
from retrain.tasks.scoring.service import ScoringBatch
from retrain_local.backend import LocalBackend
from retrain_local.training.trainer import Trainer

place, told, drawing, trained = {place!r}, [], [-1], [-1]
at(LocalBackend, "train", lambda _, batch: trained.append(batch.step), after=True)
at(Overlapped, "_sample_measured", lambda _, planned, clock: drawing.append(planned.step))

def wait_once(*_):
    if not told:
        told.append(True)
        while place in ("sampling", "scoring") and trained[-1] < {step}:
            time.sleep(0.01)
        Path({mark!r}).touch()
        for _ in range(40):
            time.sleep(0.05)

if place in ("both", "sampling"):
    at(rollout, "draw_samples", wait_once, lambda *_: drawing[-1] == {step} + 1)
if place == "scoring":
    at(ScoringBatch, "collect", wait_once, lambda *_: drawing[-1] == {step} + 1)
if place == "training":
    at(Trainer, "accumulate", wait_once, lambda _, batch: batch.step == {step})
if place == "eval":
    at(Loop, "_evaluate", wait_once, lambda loop, evaluation, step: step == {step})
if place == "drawing again":
    is_again = lambda overlap, planned, *_: planned.step == {step} + 1 and overlap._version == 0
    at(Overlapped, "_sample_next", wait_once, is_again)
"""
# where -> optimizer steps in the checkpoint that the signal leaves; with both halves at split it may be either
PLACES = {"sampling": (4,), "scoring": (4,), "training": (3,), "eval": (4,), "both": (3, 4)}


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_alone(tmp_path_factory, "split", *SPLIT)


def waiting_at(split: Path, run: Path, place: str, *arguments: str) -> subprocess.Popen[str]:
    patch = WAIT_AT_PLACE.replace("{place!r}", repr(place)).replace("{step}", str(STEP))
    return waiting(*arguments, cwd=split, patch=patch, mark=split / f"{run.name}-{place.replace(' ', '-')}.mark")


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    assert "stopped by SIGTERM" in err


def test_completions_are_one_step_old_from_the_second_step_on(split: Path) -> None:
    steps = [line for line in records(split / "never/metrics.jsonl") if line["step"] >= 0]
    assert [line["staleness_max"] for line in steps] == [0, 1, 1, 1, 1, 1]
    versions = {(r["step"], r["policy_version"]) for r in records(split / "never/emergence/generations.jsonl")}
    assert versions == {(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4)}
    assert all(line["ratio_max"] == pytest.approx(1.0, abs=1e-4) for line in steps[:1])
    assert all(line["ratio_max"] > 1.001 for line in steps[1:])
    assert steps[-1]["overlap_time_s"] == 0.0  # there is nothing to draw any more
    assert all(line["overlap_time_s"] > 0.0 for line in steps[:-1])


@pytest.mark.parametrize("place", slow_or_long(PLACES))
def test_a_signal_at_any_place_leaves_a_checkpoint_and_the_resumed_run_is_the_same(place: str, split: Path) -> None:
    run = split / place
    # no checkpoint of its own before: what is there afterwards is what the signal left
    stopped(waiting_at(split, run, place, *SPLIT, "--log-dir", str(run), "--save-every", "0", "--grace-s", "60"))
    (checkpoint,) = (run / "adapter").iterdir()
    steps = int(checkpoint.name.removeprefix("checkpoint_step_"))
    assert steps in PLACES[place], place
    check_nothing_is_half_written(run)
    backend = json.loads((checkpoint / "backend_state.json").read_text())
    assert (backend["policy_version"], backend["published_version"]) == (steps, steps - 1)
    complete(split, run, SPLIT)


@pytest.mark.long
def test_a_resumed_run_that_is_stopped_while_it_draws_again_can_be_resumed_again(split: Path) -> None:
    run = split / "twice"
    stopped(waiting_at(split, run, "eval", *SPLIT, "--log-dir", str(run), "--save-every", "0", "--grace-s", "60"))
    stopped(waiting_at(split, run, "drawing again", "--resume", str(run)))
    complete(split, run, SPLIT)


@pytest.mark.long
def test_killed_at_random_instants(split: Path) -> None:
    check_chains_of_kills(split, SPLIT, seed=917, most=10, in_a_row=3)
