"""A signal in any phase: a checkpoint within the grace period, exit code 75, and the same run after the resume."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, check_nothing_is_half_written, check_same, finish, left_alone, start
from tests.kit.shared import slow_or_long

pytestmark = pytest.mark.timeout(600)

STEP = 3
PHASES = ("sampling", "scoring", "training", "eval")
SIGNALS = {"sampling": ("SIGTERM", "SIGINT", "SIGUSR1"), "scoring": ("SIGTERM",), "training": ("SIGTERM", "SIGINT")}
SIGNALS["eval"] = ("SIGTERM", "SIGUSR1")
CASES = [(phase, name) for phase in PHASES for name in SIGNALS[phase]]

# The run tells that it has entered the phase and waits inside of it, in the work of that phase, for the signal.
WAIT_IN_PHASE = """
import time
from retrain.kernel.parts import Run

def tell_and_wait():
    Path({file!r}).touch()
    for _ in range(40):
        time.sleep(0.05)  # training is shielded: there the signal is noticed after this

state = dict(phase="", step=-2, told=False)
original_enter = Run.enter
def enter(self, step, phase):
    state.update(phase=phase, step=step)
    original_enter(self, step, phase)
Run.enter = enter

def slow(module, name, phase):
    original = getattr(module, name)
    def call(*args, **more):
        if (state["phase"], state["step"], state["told"]) == (phase, {step}, False) and phase == {phase!r}:
            state["told"] = True
            tell_and_wait()
        return original(*args, **more)
    setattr(module, name, call)

from retrain.tasks import rollout
from retrain.tasks.scoring.service import ScoringBatch
slow(rollout, "draw_samples", "sampling")
slow(rollout, "draw_samples", "eval")
slow(ScoringBatch, "collect", "scoring")
import retrain_local.training.trainer
slow(retrain_local.training.trainer.Trainer, "accumulate", "training")
"""
# As above, in a place where Python can do nothing: the checkpoint is never written.
HANG = """
import threading
from retrain.run.run_records import RunRecords
original = RunRecords.save
def hang(self, name, metrics):
    if name == "checkpoint_step_3":
        Path({file!r}).touch()
        threading.Event().wait(60)
    return original(self, name, metrics)
RunRecords.save = hang
"""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and `never`, the run that gets no signal."""
    return left_alone(tmp_path_factory, "six-steps", *BASE)


@pytest.fixture
def run(work: Path, request: pytest.FixtureRequest) -> Path:
    return work / request.node.name.replace("[", "-").replace("]", "")


def started(work: Path, run: Path, patch: str, *more: str) -> subprocess.Popen[str]:
    """A run that has come to the place that `patch` marks."""
    mark = work / f"{run.name}.mark"
    process = start(*BASE, "--log-dir", str(run), *more, cwd=work, patch=patch.replace("{file!r}", repr(str(mark))))
    while not mark.exists():
        if process.poll() is not None:
            pytest.fail(finish(process)[2])
        time.sleep(0.01)
    return process


def newest(run: Path) -> int:
    """Next step of the checkpoint that a resume takes; nothing but whole checkpoints is there."""
    check_nothing_is_half_written(run)
    (next_step,) = {json.loads(f.read_text())["next_step"] for f in (run / "adapter").glob("*/checkpoint.json")} or {0}
    return int(next_step)


@pytest.mark.parametrize(("phase", "name"), slow_or_long(CASES, ("training", "SIGTERM")))
def test_a_signal_in_any_phase_leaves_a_checkpoint_and_the_resumed_run_is_the_same(
    phase: str, name: str, work: Path
) -> None:
    run = work / f"{phase}-{name}"
    patch = WAIT_IN_PHASE.replace("{phase!r}", repr(phase)).replace("{step}", str(STEP))
    # no checkpoint of its own before: what is there afterwards is what the signal left
    process = started(work, run, patch, "--save-every", "0", "--grace-s", "20")
    process.send_signal(getattr(signal, name))
    code, _, err = finish(process)
    assert code == 75, (phase, name, err)
    assert f"stopped by {name}" in err
    assert "--resume" in err
    assert newest(run) == STEP
    manifest = json.loads((run / "run.json").read_text())
    assert (manifest["status"], manifest["reason"]) == ("stopped", name)
    assert not (run / "adapter/final").exists()
    code, _, err = finish(start("--resume", str(run), cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


@pytest.mark.slow
def test_a_second_signal_leaves_at_once_and_the_last_checkpoint_is_whole(work: Path, run: Path) -> None:
    process = started(work, run, HANG)
    process.send_signal(signal.SIGTERM)  # heard, and waits for the end of the write that hangs
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 75, err
    assert "second request (SIGINT): leaving at once" in err
    check_nothing_is_half_written(run)
    assert {path.name for path in (run / "adapter").iterdir()} >= {"checkpoint_step_1", "checkpoint_step_2"}
    assert finish(start("--resume", str(run), cwd=work))[0] == 0
    check_same(run, work / "never")


@pytest.mark.long
def test_the_grace_period_ends_what_does_not_end_by_itself(work: Path, run: Path) -> None:
    process = started(work, run, HANG, "--grace-s", "0.5")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    assert "not stopped within 0.5 s" in err
    check_nothing_is_half_written(run)
    assert finish(start("--resume", str(run), cwd=work))[0] == 0
    check_same(run, work / "never")


@pytest.mark.long
def test_leaving_by_force_before_there_is_a_checkpoint_is_a_failure(work: Path, run: Path) -> None:
    patch = HANG.replace("checkpoint_step_3", "checkpoint_step_1")
    process = started(work, run, patch, "--grace-s", "0.5")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 1
    assert finish(start("--resume", str(run), cwd=work))[0] == 0  # from the beginning, with its own seed
    check_same(run, work / "never")
