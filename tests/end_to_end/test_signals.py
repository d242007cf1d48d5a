"""A signal in any phase: a checkpoint within the grace period, exit code 75, and the same run after the resume."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, check_nothing_is_half_written, check_same, finish, left_alone, start, waiting
from tests.kit.shared import slow_or_long

pytestmark = pytest.mark.timeout(600)

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
    assert code == 1 or {path.name for path in (run / "adapter").iterdir()} >= {
        "checkpoint_step_1",
        "checkpoint_step_2",
    }
    assert finish(start("--resume", str(run), cwd=work))[0] == 0
    check_same(run, work / "never")
