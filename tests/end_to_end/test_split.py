"""Split mode: the next step is drawn while this one is trained, and nothing else is different for who stops the run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.killing import (
    BASE,
    arguments_for,
    check_nothing_is_half_written,
    check_same,
    finish,
    left_alone,
    start,
    wait_for,
)
from tests.end_to_end.running import records, tiny, untimed
from tests.kit.shared import slow_or_long

pytestmark = pytest.mark.timeout(900)

SPLIT = (*BASE, "--devices", "cpu,cpu")
STEP, KILLS, SEED, AT_ONCE = 3, 10, 917, 2

# Step 3 is trained while step 4 is drawn. The run tells that it has come to a place and waits there for the signal.
WAIT_AT_PLACE = """
import time
from retrain.run.steps.overlapped import Overlapped
from retrain.kernel.run import Trainer as Loop
from retrain.tasks import rollout
from retrain.tasks.scoring.service import ScoringBatch
from retrain_local.backend import LocalBackend
from retrain_local.training.trainer import Trainer

state = dict(told=False, drawing=-1, trained=-1)
original_train = LocalBackend.train
def train(self, batch):
    report = original_train(self, batch)
    state["trained"] = batch.step
    return report
LocalBackend.train = train

def wait_once():
    if not state["told"]:
        state["told"] = True
        while {place!r} in ("sampling", "scoring") and state["trained"] < {step}:
            time.sleep(0.01)
        Path({file!r}).touch()
        for _ in range(40):
            time.sleep(0.05)

original_sample = Overlapped._sample_measured
def sample(self, planned, clock):
    state["drawing"] = planned.step
    return original_sample(self, planned, clock)
Overlapped._sample_measured = sample

def slow(owner, name, is_time):
    original = getattr(owner, name)
    def call(*args, **more):
        if is_time(*args):
            wait_once()
        return original(*args, **more)
    setattr(owner, name, call)

place = {place!r}
if place in ("both", "sampling"):
    slow(rollout, "draw_samples", lambda *_: state["drawing"] == {step} + 1)
if place == "scoring":
    slow(ScoringBatch, "collect", lambda *_: state["drawing"] == {step} + 1)
if place == "training":
    slow(Trainer, "accumulate", lambda trainer, batch: batch.step == {step})
if place == "eval":
    slow(Loop, "_evaluate", lambda loop, evaluation, step: step == {step})
if place == "drawing again":
    slow(Overlapped, "_sample_next", lambda overlap, planned, *_: planned.step == {step} + 1 and overlap._version == 0)
"""
# where -> optimizer steps in the checkpoint that the signal leaves; with both halves at work it may be either
PLACES = {"sampling": (4,), "scoring": (4,), "training": (3,), "eval": (4,), "both": (3, 4)}


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and `never`, the split run that is left alone."""
    return left_alone(tmp_path_factory, "split", *SPLIT)


def completed(work: Path, run: Path) -> None:
    """Continue to the end; then it must be the run that was left alone."""
    code, _, err = finish(start(*arguments_for(run, SPLIT), cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


def waiting(work: Path, run: Path, place: str, *arguments: str) -> subprocess.Popen[str]:
    """A run that has come to a place, where it waits."""
    mark = work / f"{run.name}-{place.replace(' ', '-')}.mark"
    patch = WAIT_AT_PLACE.replace("{file!r}", repr(str(mark))).replace("{place!r}", repr(place))
    process = start(*arguments, cwd=work, patch=patch.replace("{step}", str(STEP)))
    while not mark.exists():
        if process.poll() is not None:
            pytest.fail(finish(process)[2])
        time.sleep(0.01)
    return process


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
    stopped(waiting(work, run, place, *SPLIT, "--log-dir", str(run), "--save-every", "0", "--grace-s", "60"))
    (checkpoint,) = (run / "adapter").iterdir()
    steps = int(checkpoint.name.removeprefix("checkpoint_step_"))
    assert steps in PLACES[place], place
    check_nothing_is_half_written(run)
    backend = json.loads((checkpoint / "backend_state.json").read_text())
    assert (backend["policy_version"], backend["published_version"]) == (steps, steps - 1)
    completed(work, run)


@pytest.mark.long
def test_a_resumed_run_that_is_stopped_while_it_draws_again_can_be_resumed_again(work: Path) -> None:
    run = work / "twice"
    stopped(waiting(work, run, "eval", *SPLIT, "--log-dir", str(run), "--save-every", "0", "--grace-s", "60"))
    stopped(waiting(work, run, "drawing again", "--resume", str(run)))
    completed(work, run)


@pytest.mark.slow
@pytest.mark.long
def test_killed_at_random_instants(work: Path) -> None:
    lines = records(work / "never/metrics.jsonl")
    stepping_s = sum(line.get("step_time_s", 0.0) + line.get("eval_time_s", 0.0) for line in lines)

    def chain(worker: int) -> int:
        chooser, kills = random.Random(SEED + worker), 0
        while kills < KILLS // AT_ONCE:
            run = work / f"killed-{worker}-{kills}"
            for _ in range(3):
                process = start(*arguments_for(run, SPLIT), cwd=work)
                wait_for(process, run / "run.json")
                time.sleep(chooser.uniform(0.0, 0.7 * stepping_s))
                process.kill()
                finish(process)
                kills += process.returncode < 0
                check_nothing_is_half_written(run)
            completed(work, run)
        return kills

    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert sum(pool.map(chain, range(AT_ONCE))) >= KILLS


@pytest.mark.long
def test_a_finished_run_can_be_extended(work: Path) -> None:
    run = work / "extended"
    assert finish(start(*SPLIT, "--max-steps", "4", "--log-dir", str(run), cwd=work))[0] == 0
    code, _, err = finish(start("--resume", str(run), "--max-steps", "6", cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


@pytest.mark.long
def test_three_devices_draw_the_same_tokens_as_two(work: Path) -> None:
    """Two engines share the requests; floating-point rounding of other batches is all that may differ."""
    run = work / "three"
    code, out, err = finish(start(*SPLIT, "--devices", "cpu,cpu,cpu", "--log-dir", str(run), cwd=work))
    assert code == 0, err
    assert "split_mode=True" in out
    ours, theirs = (untimed(each / "metrics.jsonl") for each in (run, work / "never"))
    for name in ("sampled_tokens", "correct_rate", "staleness_mean"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs], name


@pytest.mark.slow
@pytest.mark.long
def test_a_split_run_learns(tmp_path: Path) -> None:
    tiny("--seed", "1", "--devices", "cpu,cpu", cwd=tmp_path)
    rates = [r["eval_correct_rate"] for r in records(tmp_path / "logs/tiny/metrics.jsonl") if "eval_correct_rate" in r]
    assert rates[0] <= 0.60
    assert rates[-1] >= 0.85
