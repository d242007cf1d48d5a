"""The order of things, with runs that are scripted: what is retried, continued, begun anew, stopped, adopted."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Job
from retrain.campaign import schedule as module
from retrain.campaign.load import Campaign
from retrain.campaign.manifest import CampaignRecord, Manifest, new_content
from retrain.campaign.planned import plan_runs
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUps, Schedule, Stops
from retrain.kernel.errors import BackendError
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import save_checkpoint
from retrain.records.files import RunLock

SEEDS = "seeds = [1, 2]\nmax_steps = 4\n"
ONE = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "toy_flat"\n'
A, B = "grpo+toy_flat_s1", "grpo+toy_flat_s2"
Step = Callable[[Job], int | None]


def record(job: Job, status: str, **more: Any) -> None:
    content = {"status": status, "seed": 1, "started": "now", "config": {}} | more
    (job.folder / "run.json").write_text(json.dumps(content))


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


def goes_on(job: Job) -> None:
    record(job, "running")


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

    def __init__(self, owner: Scripted, job: Job, step: Step) -> None:
        self.owner, self.job, self.step = owner, job, step
        self.code: int | None = None
        self.signals: list[str] = []

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.step(self.job)
            self.owner.at_once -= self.code is not None
        return self.code

    def stop(self) -> None:
        self.signals.append("stop")
        record(self.job, "stopped")
        self.step = lambda job: 75

    def kill(self) -> None:
        self.signals.append("kill")


@pytest.fixture
def make(
    load_text: Callable[..., Campaign], toy_plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Schedule]:
    """`make(launcher, workers=1, campaign="retries = 1")`: the schedule of two runs in `out`."""
    monkeypatch.setattr(module, "POLL_S", 0.0)

    def build(launcher: Any, *, workers: int = 1, campaign: str = "", stops: Stops | None = None) -> Schedule:
        loaded = load_text(SEEDS + campaign, ONE)
        folder = Path("out")
        folder.mkdir(exist_ok=True)
        runs = plan_runs(loaded, folder)
        lines = Lines(len(runs), parallel=workers > 1)
        return Schedule(
            loaded,
            runs,
            workers=workers,
            throttle_dir=None,
            manifest=Manifest(folder, new_content(loaded, runs, datetime.now(UTC))),
            launcher=launcher,
            lines=lines,
            follow_ups=FollowUps(loaded, toy_plugins, folder, frozenset()),
            stops=stops or Stops(),
            record=CampaignRecord(folder, lines),
        )

    return build


def entries() -> dict[str, dict[str, Any]]:
    return {entry["run_name"]: entry for entry in json.loads(Path("out/manifest.json").read_text())["runs"]}


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


def test_a_failed_run_begins_anew_and_keeps_its_records(
    make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Scripted(a_=[fails])
    schedule = make(launcher)
    schedule.run()
    assert launcher.started == [(A, False), (A, False), (B, False)]
    assert schedule.failures == {}
    assert json.loads(Path(f"out/runs/{A}.1/run.json").read_text())["status"] == "failed"
    assert entries()[A]["attempts"] == 2
    assert "  FAILED: exit 1: BackendError: out of memory; retrying, 1 attempt left" in capsys.readouterr().out


def test_a_failed_run_with_a_checkpoint_is_continued(make: Callable[..., Schedule]) -> None:
    launcher = Scripted(a_=[fails_with_checkpoint])
    make(launcher).run()
    assert launcher.started[:2] == [(A, False), (A, True)]


@pytest.mark.parametrize("retries", [0, 2])
def test_a_run_that_keeps_failing_ends_no_other(make: Callable[..., Schedule], retries: int) -> None:
    launcher = Scripted(a_=[fails] * 9)
    schedule = make(launcher, campaign=f"retries = {retries}")
    schedule.run()
    assert [name for name, _ in launcher.started] == [A] * (retries + 1) + [B]
    assert schedule.failures == {A: "exit 1: BackendError: out of memory"}
    assert (entries()[A]["status"], entries()[A]["returncode"], entries()[B]["status"]) == ("failed", 1, "done")
    assert entries()[A]["error"] == "exit 1: BackendError: out of memory"


def test_a_killed_run_is_continued(make: Callable[..., Schedule]) -> None:
    launcher = Scripted(a_=[is_killed])
    make(launcher).run()
    assert launcher.started[:2] == [(A, False), (A, True)]


def test_a_refused_resume_begins_anew(make: Callable[..., Schedule]) -> None:
    launcher = Scripted(a_=[is_killed, refuses])
    schedule = make(launcher, campaign="retries = 2")
    schedule.run()
    assert launcher.started[:3] == [(A, False), (A, True), (A, False)]
    assert schedule.failures == {}
    assert Path(f"out/runs/{A}.1").is_dir()


def test_a_faulty_configuration_is_not_tried_twice(make: Callable[..., Schedule]) -> None:
    launcher = Scripted(a_=[refuses])
    schedule = make(launcher)
    schedule.run()
    assert [name for name, _ in launcher.started] == [A, B]
    assert schedule.failures == {A: "exit 2: it is damaged"}


def test_a_run_that_gets_further_may_be_taken_away_as_often_as_it_takes(
    make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]
) -> None:
    def taken_after(step: int) -> Step:
        def end(job: Job) -> int:
            record(job, "stopped")
            with (job.folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": step}) + "\n")
            return 75

        return end

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
            job = Job(name=name, argv=(), environ={}, cwd=Path(), folder=folder)
            folder.mkdir(parents=True, exist_ok=True)
            return ScriptedJob(self, job, is_killed) if name == A else None

    launcher = Finding()
    schedule = make(launcher, workers=2)
    assert list(schedule._active) == [A]
    schedule.run()
    assert sorted(launcher.started) == [(A, True), (B, False)]
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


def test_a_stop_asks_every_run_and_waits(make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]) -> None:
    stops = Stops()

    def stop_soon(job: Job) -> None:
        goes_on(job)
        stops.request("SIGTERM")

    launcher = Scripted(a_=[stop_soon])
    schedule = make(launcher, stops=stops)
    schedule.run()
    assert [job.signals for job in launcher.jobs] == [["stop"]]
    assert entries()[A]["status"] == "stopped"
    assert (entries()[B]["status"], schedule.failures) == ("queued", {})
    assert "Stopping (SIGTERM): 1 runs save their state" in capsys.readouterr().out
    launcher = Scripted()
    make(launcher).run()
    assert launcher.started == [(A, True), (B, False)]


def test_a_second_signal_ends_runs_that_do_not_listen(make: Callable[..., Schedule]) -> None:
    stops = Stops()

    def deaf(job: Job) -> None:
        goes_on(job)
        stops.request("SIGINT")

    class Deaf(Scripted):
        def start(self, job: Job) -> ScriptedJob:
            made = super().start(job)
            made.stop = lambda: made.signals.append("stop")  # type: ignore[method-assign]
            return made

    launcher = Deaf(a_=[deaf])
    make(launcher, stops=stops).run()
    assert launcher.jobs[0].signals == ["stop", "kill"]


def test_a_run_that_is_still_alive_is_waited_for(make: Callable[..., Schedule]) -> None:
    folder = Path("out/runs") / A
    launcher = Scripted()
    make(launcher)  # the current folder is the test's own from here on
    folder.mkdir(parents=True)
    lock = RunLock(folder)
    schedule = make(launcher, workers=2)
    schedule._launch()
    schedule._collect()
    assert launcher.started == [(B, False)]
    done(Job(name=A, argv=(), environ={}, cwd=Path(), folder=folder))
    lock.release()
    schedule.run()
    assert launcher.started == [(B, False)]
    assert {entry["status"] for entry in entries().values()} == {"done"}


def test_an_orphan_of_a_lost_job_is_adopted_not_doubled(make: Callable[..., Schedule]) -> None:
    locks: list[RunLock] = []

    def loses_its_worker(job: Job) -> int:
        record(job, "running")
        locks.append(RunLock(job.folder))
        return -9

    launcher = Scripted(a_=[loses_its_worker])
    schedule = make(launcher)
    schedule._launch()
    schedule._collect()
    assert schedule._active[A].is_own is False
    locks[0].release()  # it dies, too
    schedule.run()
    assert launcher.started == [(A, False), (A, True), (B, False)]
    assert entries()[A]["attempts"] == 2
