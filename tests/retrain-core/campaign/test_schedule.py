"""The order of things, with runs that are scripted: what is retried, continued, stopped, adopted, looked at."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from retrain.api import Job
from retrain.campaign.load import PlanTable, seal_plan
from retrain.campaign.looks import Look, StudyJudge
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import Stops
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.records.checkpoints import save_checkpoint
from retrain.records.files import RunLock
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import Finishes, conditions, record

A, B = "grpo+toy_flat_s1", "grpo+toy_flat_s2"


def done(job):
    record(job, "done")
    (job.folder / "adapter/final").mkdir(parents=True)
    return 0


def fails(job):
    record(job, "failed", error="BackendError: out of memory")
    return 1


def fails_with_checkpoint(job):
    save_checkpoint(job.folder / "adapter", "checkpoint_step_1", lambda folder: None, {"next_step": 1})
    return fails(job)


def is_killed(job):
    record(job, "running")
    return -9


def refuses(job):
    (job.folder / "stderr.log").write_text("retrain: resume error\nit is damaged\n    fix: mend it\n")
    return 2


def taken_after(step):
    def end(job):
        record(job, "stopped")
        with (job.folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step}) + "\n")
        return 75

    return end


class Scripted:
    """A launcher whose jobs do one scripted step each, then end."""

    def __init__(self, **scripts):
        self.scripts = {name.replace("a_", A).replace("b_", B): steps for name, steps in scripts.items()}
        self.started = []
        self.at_once = self.most_at_once = 0
        self.jobs = []

    def start(self, job):
        steps = self.scripts.get(job.name, [])
        self.started.append((job.name, "--resume" in job.argv))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.jobs.append(ScriptedJob(self, job, steps.pop(0) if steps else done))
        return self.jobs[-1]


class ScriptedJob:
    pid = None

    def __init__(self, owner, job, step, *, is_deaf=False):
        self.owner, self.job, self.step, self.is_deaf = owner, job, step, is_deaf
        self.code = None
        self.signals = []

    def poll(self):
        if self.code is None:
            self.code = self.step(self.job)
            self.owner.at_once -= self.code is not None
        return self.code

    def stop(self):
        self.signals.append("stop")
        if not self.is_deaf:
            record(self.job, "stopped")
            self.step = lambda job: 75

    def kill(self):
        self.signals.append("kill")


@pytest.fixture
def make(load_text, scheduled):
    """`make(launcher, workers=1, campaign="retries = 1")`: the schedule of two runs in `out`."""

    def build(launcher, *, campaign="", **options):
        loaded = load_text(f"seeds = [1, 2]\nmax_steps = 4\n{campaign}", conditions("grpo+toy_flat"))
        return scheduled(loaded, launcher, **options)

    return build


def entries():
    return {entry["run_name"]: entry for entry in manifest()["runs"]}


def job_of(name):
    folder = Path("out/runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    return Job(name=name, argv=(), environ={}, cwd=Path(), folder=folder)


def test_one_after_the_other(make, capsys):
    launcher = Scripted()
    make(launcher).run()
    assert launcher.started == [(A, False), (B, False)]
    assert launcher.most_at_once == 1
    assert capsys.readouterr().out.splitlines() == [f"[1/2] {A}", "  OK", f"[2/2] {B}", "  OK"]
    assert {(e["status"], e["returncode"], e["attempts"]) for e in entries().values()} == {("done", 0, 1)}


def test_several_at_a_time(make, capsys):
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
def test_a_run_that_fails_is_retried_as_it_can_be_and_ends_no_other(make, retries, steps, resumes, is_kept, failure):
    launcher = Scripted(a_=list(steps))
    schedule = make(launcher, campaign=f"retries = {retries}")
    schedule.run()
    assert launcher.started == [*((A, resume) for resume in resumes), (B, False)]
    assert Path(f"out/runs/{A}.1/").is_dir() is is_kept
    found = entries()
    assert (found[A]["attempts"], found[A]["status"]) == (len(resumes), "failed" if failure else "done")
    assert (schedule.failures, found[B]["status"]) == ({A: failure} if failure else {}, "done")
    assert not failure or (found[A]["error"], found[A]["returncode"]) == (failure, int(failure[5]))


def test_a_run_that_gets_further_may_be_taken_away_as_often_as_it_takes(make, capsys):
    launcher = Scripted(a_=[taken_after(step) for step in (0, 1, 2)], b_=[taken_after(1) for _ in range(9)])
    schedule = make(launcher)
    schedule.run()
    assert launcher.started[:4] == [(A, False), (A, True), (A, True), (A, True)]
    assert (entries()[A]["status"], entries()[A]["attempts"]) == ("done", 4)
    assert "exit 75; it got further, and is continued" in capsys.readouterr().out
    assert schedule.failures == {B: "exit 75"}  # it stands still: the first attempt counted as none, `retries` as two
    assert entries()[B]["attempts"] == 3


def test_jobs_of_an_earlier_session_are_waited_for(make):
    class Finding(Scripted):
        def find(self, name, folder):
            return ScriptedJob(self, job_of(name), is_killed) if name == A else None

    launcher = Finding()
    schedule = make(launcher, workers=2)
    schedule.run()
    assert sorted(launcher.started) == [(A, True), (B, False)]  # A only once the job that was found is gone
    assert schedule.failures == {}


def test_what_the_launcher_refuses_is_a_failed_run(make):
    class Refusing(Scripted):
        def start(self, job):
            if job.name == A:
                raise BackendError("no room")
            return super().start(job)

    schedule = make(Refusing())
    schedule.run()
    assert schedule.failures == {A: "no room"}
    assert entries()[B]["status"] == "done"


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_stop_asks_every_run_and_a_second_one_ends_those_that_do_not_listen(make, capsys, is_deaf):
    stops = Stops()

    def stop_soon(job):
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


def test_a_run_that_is_still_alive_is_waited_for(make):
    def ends_the_other(job):
        done(job_of(A))
        lock.release()
        return done(job)

    launcher = Scripted(b_=[ends_the_other])
    make(launcher)  # the current folder is the test's own from here on
    lock = RunLock(job_of(A).folder)
    make(launcher, workers=2).run()
    assert launcher.started == [(B, False)]
    assert {entry["status"] for entry in entries().values()} == {"done"}


def test_an_orphan_of_a_lost_job_is_adopted_not_doubled(make):
    locks = []

    class Watched(Stops):
        """Sees the orphan in the list of active runs, and lets it die."""

        def wait(self, seconds):
            if locks:
                assert launcher.started == [(A, False)]
                locks.pop().release()

    def loses_its_worker(job):
        locks.append(RunLock(job.folder))
        return is_killed(job)

    launcher = Scripted(a_=[loses_its_worker])
    schedule = make(launcher, stops=Watched(), campaign="retries = 0")
    schedule.run()
    assert schedule.failures == {}  # its end says nothing: it is continued, which is no retry
    assert launcher.started == [(A, False), (A, True), (B, False)]
    assert entries()[A]["attempts"] == 2


def test_signals_request_a_stop_and_a_second_one_is_urgent():
    stops, before = Stops(), signal.getsignal(signal.SIGHUP)
    with stops.installed():
        os.kill(os.getpid(), signal.SIGHUP)
        assert (stops.reason, stops.is_urgent) == ("SIGHUP", False)
        os.kill(os.getpid(), signal.SIGINT)
    assert (stops.reason, stops.is_urgent) == ("SIGHUP", True)
    assert signal.getsignal(signal.SIGHUP) == before


FIRST, SECOND, THIRD = "grpo+toy_flat", "toy_raw+toy_flat", "toy_raw+toy_index"
FIVE = "seeds = [5, 4, 3, 2, 1]\nmax_steps = 4\nretries = 0\n"
PLAN = '[campaign.plan]\nhypothesis = "B is better"\nlooks = [2, 3, 5]\n'
LOADED = {}  # frozen, and slow to load


def judged(*closed):
    """A judge that closes at its nth look what the nth entry says."""
    left = list(closed)

    def judge(seeds, open_labels):
        now = left.pop(0) if left else {}
        return Look(seeds=seeds, closed=dict(now), open={each: None for each in open_labels if each not in now})

    return judge


@pytest.fixture
def campaign(load_text):
    """Three conditions, five seeds, looks after 2, 3 and 5."""
    if not LOADED:
        LOADED[PLAN] = load_text(FIVE + conditions(FIRST, SECOND, THIRD), PLAN)
    return LOADED[PLAN]


@pytest.fixture
def make_looking(campaign, scheduled):
    """`make_looking(launcher, judge=judged(...))`: the schedule of three conditions and five seeds."""
    return partial(scheduled, campaign)


def names(labels, seeds):
    return [f"{label}_s{seed}" for label in labels for seed in seeds]


def looked():
    return [(look["seeds"], list(look["closed"])) for look in manifest().get("looks", ())]


def test_seeds_first_and_no_more_than_needed(make_looking, capsys):
    launcher = Finishes()
    make_looking(launcher, judge=judged({}, {SECOND: "better"}, {THIRD: "worse"})).run()
    assert launcher.started == names([FIRST, SECOND, THIRD], [5, 4]) + names([FIRST, SECOND, THIRD], [3]) + names(
        [FIRST, THIRD], [2, 1]
    )
    entries = {entry["run_name"]: entry["status"] for entry in manifest()["runs"]}
    assert [name for name, status in entries.items() if status == "not needed"] == names([SECOND], [2, 1])
    assert looked() == [(2, []), (3, [SECOND]), (5, [THIRD])]
    assert f"look after 3 seeds: {SECOND}: better; {THIRD}: cannot tell" in capsys.readouterr().out


def test_it_stops_when_every_verdict_is_in(make_looking):
    launcher = Finishes()
    make_looking(launcher, judge=judged({SECOND: "better", THIRD: "futile"}), workers=4).run()
    assert sorted(launcher.started) == sorted(names([FIRST, SECOND, THIRD], [5, 4]))
    assert [entry["status"] for entry in manifest()["runs"]].count("not needed") == 9


class KillError(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("is_recorded", [True, False])
def test_killed_at_a_look_it_continues_the_same_way(make_looking, monkeypatch, is_recorded):
    """The runner dies while it looks, or right after the decision was recorded."""
    verdicts = ({SECOND: "worse"}, {THIRD: "better"})

    def dies(*_):
        if not is_recorded or "looks" in manifest():
            raise KillError

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "say", dies if is_recorded else Lines.say)
        with pytest.raises(KillError):
            make_looking(Finishes(), judge=judged(*verdicts) if is_recorded else dies).run()
    assert looked() == ([(2, [SECOND])] if is_recorded else [])
    rest = Finishes()
    make_looking(rest, judge=judged(*verdicts[is_recorded:])).run()
    assert rest.started == names([FIRST, THIRD], [3])
    assert looked() == [(2, [SECOND]), (3, [THIRD])]


def test_what_failed_for_good_does_not_hold_the_look_up(make_looking):
    launcher = Finishes(f"{SECOND}_s4")
    schedule = make_looking(launcher, judge=judged({SECOND: "better", THIRD: "better"}))
    schedule.run()
    assert len(launcher.started) == 6
    assert list(schedule.failures) == [f"{SECOND}_s4"]


def test_a_look_at_nothing_ends_the_campaign_and_can_be_taken_later(make_looking):
    def nothing(seeds, open_labels):
        raise ConfigError(Problem(what="no run can be compared"))

    launcher = Finishes()
    schedule = make_looking(launcher, judge=nothing)
    schedule.run()
    assert schedule.cannot_look
    assert (len(launcher.started), looked()) == (6, [])
    make_looking(launcher, judge=judged({SECOND: "better", THIRD: "better"})).run()
    assert len(launcher.started) == 6


def test_the_plan_writes_its_stop_rule(campaign):
    content = campaign.table.plan.content()
    assert (content["looks"], content["n_max"], content["spend"]) == ([2, 3, 5], 5, "pocock")
    assert content["stop_rule"].startswith("looks after 2, 3 and 5 seeds")
    assert PlanTable(**content).content() == content  # as `--resume` reads it back
    assert StudyJudge.of(campaign, Path("out")) is not None
    plain = PlanTable(hypothesis="h")
    assert set(plain.content()) == {"hypothesis", "primary_metric", "alpha", "stop_rule", "baseline", "direction"}
    assert PlanTable(**plain.model_dump()).content() == plain.content()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"looks": [2, 4]}, "plan.last-look"),
        ({"looks": [3, 2, 5]}, "ascending order"),
        ({"looks": [0, 5]}, "ascending order"),
        ({"looks": [2, 5], "n_max": 6}, "they must be equal"),
        ({"looks": [2, 5], "stop_rule": "when I am tired"}, "written by the plan"),
        ({"n_max": 5}, "no effect without looks"),
        ({"spend": "obrien_fleming"}, "no effect without looks"),
        ({"baseline": "nobody"}, "plan.unknown-baseline"),
    ],
)
def test_plans_that_contradict_themselves(wrong, message):
    with pytest.raises((ValidationError, ConfigError)) as caught:
        seal_plan(
            PlanTable(hypothesis="h", **wrong), conditions=[FIRST], seeds=[1, 2, 3, 4, 5], max_steps=1, written=""
        )
    assert message in str(caught.value)
