"""The order of things, with runs that are scripted: what is retried, continued, begun again, stopped, adopted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Job
from retrain.campaign.load import Campaign
from retrain.campaign.schedule import Schedule, Stops
from retrain.kernel.errors import BackendError
from retrain.records.checkpoints import save_checkpoint
from retrain.records.files import RunLock
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import conditions, record

A, B = "grpo+toy_flat_s1", "grpo+toy_flat_s2"
Step = Callable[[Job], int | None]


def done(job: Job) -> int:
    record(job, "done")
    (job.folder / "adapter/final").mkdir(parents=True)
    return 0


def fails(job: Job) -> int:
    record(job, "failed", error="BackendError: out of memory")
    return 1


def fails_with_checkpoint(job: Job) -> int:
    save_checkpoint(job.folder / "adapter", "checkpoint_step_1", lambda folder: None, {"next_step": 1})
    return fails(job)


def is_killed(job: Job) -> int:
    record(job, "running")
    return -9


def refuses(job: Job) -> int:
    (job.folder / "stderr.log").write_text("retrain: resume error\nit is damaged\n    fix: mend it\n")
    return 2


def taken_after(step: int) -> Step:
    def end(job: Job) -> int:
        record(job, "stopped")
        with (job.folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step}) + "\n")
        return 75

    return end


class Scripted:
    """A launcher whose jobs do one scripted step each, then end."""

    def __init__(self, **scripts: list[Step]) -> None:
        self.scripts = {name.replace("a_", A).replace("b_", B): steps for name, steps in scripts.items()}
        self.started: list[tuple[str, bool]] = []
        self.at_once = self.most_at_once = 0
        self.jobs: list[ScriptedJob] = []

    def start(self, job: Job) -> ScriptedJob:
        steps = self.scripts.get(job.name, [])
        self.started.append((job.name, "--resume" in job.argv))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.jobs.append(ScriptedJob(self, job, steps.pop(0) if steps else done))
        return self.jobs[-1]


class ScriptedJob:
    pid = None

    def __init__(self, owner: Scripted, job: Job, step: Step, *, is_deaf: bool = False) -> None:
        self.owner, self.job, self.step, self.is_deaf = owner, job, step, is_deaf
        self.code: int | None = None
        self.signals: list[str] = []

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.step(self.job)
            self.owner.at_once -= self.code is not None
        return self.code

    def stop(self) -> None:
        self.signals.append("stop")
        if not self.is_deaf:
            record(self.job, "stopped")
            self.step = lambda job: 75

    def kill(self) -> None:
        self.signals.append("kill")


@pytest.fixture
def make(load_text: Callable[..., Campaign], scheduled: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """`make(launcher, workers=1, campaign="retries = 1")`: the schedule of two runs in `out`."""

    def build(launcher: Any, *, campaign: str = "", **options: Any) -> Schedule:
        loaded = load_text(f"seeds = [1, 2]\nmax_steps = 4\n{campaign}", conditions("grpo+toy_flat"))
        return scheduled(loaded, launcher, **options)

    return build


def entries() -> dict[str, dict[str, Any]]:
    return {entry["run_name"]: entry for entry in manifest()["runs"]}


def job_of(name: str) -> Job:
    folder = Path("out/runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    return Job(name=name, argv=(), environ={}, cwd=Path(), folder=folder)


def test_one_after_the_other(make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Scripted()
    make(launcher).run()
    assert launcher.started == [(A, False), (B, False)]
    assert launcher.most_at_once == 1
    assert capsys.readouterr().out.splitlines() == [f"[1/2] {A}", "  OK", f"[2/2] {B}", "  OK"]
    assert {(e["status"], e["returncode"], e["attempts"]) for e in entries().values()} == {("done", 0, 1)}


def test_several_at_a_time(make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Scripted()
    make(launcher, workers=2).run()
    assert launcher.most_at_once == 2
    assert f"[2/2] {B} started\n  {A} ok (" in capsys.readouterr().out


MEMORY = "exit 1: BackendError: out of memory"


@pytest.mark.parametrize(
    ("retries", "steps", "resumes", "is_kept", "failure"),
    [
        pytest.param(1, [fails], [False, False], True, "", id="begins again and keeps its records"),
        pytest.param(1, [fails_with_checkpoint], [False, True], False, "", id="is continued from a checkpoint"),
        pytest.param(1, [is_killed], [False, True], False, "", id="a killed run is continued"),
        pytest.param(2, [is_killed, refuses], [False, True, False], True, "", id="a refused resume begins again"),
        pytest.param(1, [refuses], [False], False, "exit 2: it is damaged", id="a faulty configuration fails at once"),
        pytest.param(0, [fails] * 9, [False], False, MEMORY, id="without retries"),
        pytest.param(2, [fails] * 9, [False] * 3, True, MEMORY, id="fails after its retries"),
    ],
)
def test_a_run_that_fails_is_retried_as_it_can_be_and_ends_no_other(
    make: Callable[..., Schedule], retries: int, steps: list[Step], resumes: list[bool], is_kept: bool, failure: str
) -> None:
    launcher = Scripted(a_=list(steps))
    schedule = make(launcher, campaign=f"retries = {retries}")
    schedule.run()
    assert launcher.started == [*((A, resume) for resume in resumes), (B, False)]
    assert Path(f"out/runs/{A}.1/").is_dir() is is_kept
    found = entries()
    assert (found[A]["attempts"], found[A]["status"]) == (len(resumes), "failed" if failure else "done")
    assert (schedule.failures, found[B]["status"]) == ({A: failure} if failure else {}, "done")
    assert not failure or (found[A]["error"], found[A]["returncode"]) == (failure, int(failure[5]))


def test_a_run_that_gets_further_may_be_taken_away_as_often_as_it_takes(
    make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Scripted(a_=[taken_after(step) for step in (0, 1, 2)], b_=[taken_after(1) for _ in range(9)])
    schedule = make(launcher)
    schedule.run()
    assert launcher.started[:4] == [(A, False), (A, True), (A, True), (A, True)]
    assert (entries()[A]["status"], entries()[A]["attempts"]) == ("done", 4)
    assert "exit 75; it got further, and is continued" in capsys.readouterr().out
    assert schedule.failures == {B: "exit 75"}  # it stands still: the first attempt counted as none, `retries` as two
    assert entries()[B]["attempts"] == 3


def test_jobs_of_an_earlier_session_are_waited_for(make: Callable[..., Schedule]) -> None:
    class Finding(Scripted):
        def find(self, name: str, folder: Path) -> ScriptedJob | None:
            return ScriptedJob(self, job_of(name), is_killed) if name == A else None

    launcher = Finding()
    schedule = make(launcher, workers=2)
    schedule.run()
    assert sorted(launcher.started) == [(A, True), (B, False)]  # A only once the job that was found is gone
    assert schedule.failures == {}


def test_what_the_launcher_refuses_is_a_failed_run(make: Callable[..., Schedule]) -> None:
    class Refusing(Scripted):
        def start(self, job: Job) -> ScriptedJob:
            if job.name == A:
                raise BackendError("no room")
            return super().start(job)

    schedule = make(Refusing())
    schedule.run()
    assert schedule.failures == {A: "no room"}
    assert entries()[B]["status"] == "done"


def test_what_is_done_is_not_run_again(make: Callable[..., Schedule]) -> None:
    make(Scripted(b_=[fails] * 2)).run()
    launcher = Scripted()
    make(launcher).run()
    assert launcher.started == [(B, False)]


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_stop_asks_every_run_and_a_second_one_ends_those_that_do_not_listen(
    make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str], is_deaf: bool
) -> None:
    stops = Stops()

    def stop_soon(job: Job) -> None:
        record(job, "running")
        launcher.jobs[0].is_deaf = is_deaf
        stops.request("SIGTERM")

    launcher = Scripted(a_=[stop_soon])
    schedule = make(launcher, stops=stops)
    schedule.run()
    assert launcher.jobs[0].signals == (["stop", "kill"] if is_deaf else ["stop"])
    assert (entries()[A]["status"], entries()[B]["status"], schedule.failures) == ("stopped", "queued", {})
    assert "Stopping (SIGTERM): 1 runs save their state" in capsys.readouterr().out
    launcher = Scripted()
    make(launcher).run()
    assert launcher.started == [(A, True), (B, False)]


def test_a_run_that_is_still_alive_is_waited_for(make: Callable[..., Schedule]) -> None:
    def ends_the_other(job: Job) -> int:
        done(job_of(A))
        lock.release()
        return done(job)

    launcher = Scripted(b_=[ends_the_other])
    make(launcher)  # the current folder is the test's own from here on
    lock = RunLock(job_of(A).folder)
    make(launcher, workers=2).run()
    assert launcher.started == [(B, False)]
    assert {entry["status"] for entry in entries().values()} == {"done"}


def test_an_orphan_of_a_lost_job_is_adopted_not_doubled(make: Callable[..., Schedule]) -> None:
    locks: list[RunLock] = []

    class Watched(Stops):
        """Sees the orphan in the list of active runs, and lets it die."""

        def wait(self, seconds: float) -> None:
            if locks:
                assert launcher.started == [(A, False)]
                locks.pop().release()

    def loses_its_worker(job: Job) -> int:
        locks.append(RunLock(job.folder))
        return is_killed(job)

    launcher = Scripted(a_=[loses_its_worker])
    schedule = make(launcher, stops=Watched(), campaign="retries = 0")
    schedule.run()
    assert schedule.failures == {}  # its end says nothing: it is continued, which is no retry
    assert launcher.started == [(A, False), (A, True), (B, False)]
    assert entries()[A]["attempts"] == 2


def test_signals_request_a_stop_and_a_second_one_is_urgent() -> None:
    stops, before = Stops(), signal.getsignal(signal.SIGHUP)
    with stops.installed():
        os.kill(os.getpid(), signal.SIGHUP)
        assert (stops.reason, stops.is_urgent) == ("SIGHUP", False)
        os.kill(os.getpid(), signal.SIGINT)
    assert (stops.reason, stops.is_urgent) == ("SIGHUP", True)
    assert signal.getsignal(signal.SIGHUP) == before
