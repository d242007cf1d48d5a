"""Split mode: the next step is drawn while this one is trained, and nothing else is different for who stops the run."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.killing import (
    BASE,
    check_chains_of_kills,
    check_nothing_is_half_written,
    complete,
    finish,
    left_alone,
    waiting,
)
from tests.end_to_end.running import records
from tests.kit.shared import slow_or_long

pytestmark = pytest.mark.timeout(900)

SPLIT = (*BASE, "--devices", "cpu,cpu")
STEP = 3

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
# where -> optimizer steps in the checkpoint that the signal leaves; with both halves at work it may be either
PLACES = {"sampling": (4,), "scoring": (4,), "training": (3,), "eval": (4,), "both": (3, 4)}


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_alone(tmp_path_factory, "split", *SPLIT)


def waiting_at(work: Path, run: Path, place: str, *arguments: str) -> subprocess.Popen[str]:
    patch = WAIT_AT_PLACE.replace("{place!r}", repr(place)).replace("{step}", str(STEP))
    return waiting(*arguments, cwd=work, patch=patch, mark=work / f"{run.name}-{place.replace(' ', '-')}.mark")


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    assert "stopped by SIGTERM" in err


def test_completions_are_one_step_old_from_the_second_step_on(work: Path) -> None:
    steps = [line for line in records(work / "never/metrics.jsonl") if line["step"] >= 0]
    assert [line["staleness_max"] for line in steps] == [0, 1, 1, 1, 1, 1]
    versions = {(r["step"], r["policy_version"]) for r in records(work / "never/emergence/generations.jsonl")}
    assert versions == {(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4)}
    assert all(line["ratio_max"] == pytest.approx(1.0, abs=1e-4) for line in steps[:1])
    assert all(line["ratio_max"] > 1.001 for line in steps[1:])
    assert steps[-1]["overlap_time_s"] == 0.0  # there is nothing to draw any more
    assert all(line["overlap_time_s"] > 0.0 for line in steps[:-1])


@pytest.mark.parametrize("place", slow_or_long(PLACES))
def test_a_signal_at_any_place_leaves_a_checkpoint_and_the_resumed_run_is_the_same(place: str, work: Path) -> None:
    run = work / place
    # no checkpoint of its own before: what is there afterwards is what the signal left
    stopped(waiting_at(work, run, place, *SPLIT, "--log-dir", str(run), "--save-every", "0", "--grace-s", "60"))
    (checkpoint,) = (run / "adapter").iterdir()
    steps = int(checkpoint.name.removeprefix("checkpoint_step_"))
    assert steps in PLACES[place], place
    check_nothing_is_half_written(run)
    backend = json.loads((checkpoint / "backend_state.json").read_text())
    assert (backend["policy_version"], backend["published_version"]) == (steps, steps - 1)
    complete(work, run, SPLIT)


@pytest.mark.long
def test_a_resumed_run_that_is_stopped_while_it_draws_again_can_be_resumed_again(work: Path) -> None:
    run = work / "twice"
    stopped(waiting_at(work, run, "eval", *SPLIT, "--log-dir", str(run), "--save-every", "0", "--grace-s", "60"))
    stopped(waiting_at(work, run, "drawing again", "--resume", str(run)))
    complete(work, run, SPLIT)


@pytest.mark.long
def test_killed_at_random_instants(work: Path) -> None:
    check_chains_of_kills(work, SPLIT, seed=917, most=10, in_a_row=3)
