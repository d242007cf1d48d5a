"""Launcher `slurm`: every end that a job can have, and a controller that goes away."""

import json
import logging
import signal
import stat
import sys

import pytest

from retrain.api import FindsJobs, Job
from retrain.campaign import slurm_commands
from retrain.campaign.slurm_launcher import RECORD, START, Options, SlurmLauncher
from retrain.kernel.errors import EXIT_RESUMABLE, EXIT_USAGE
from retrain.testing import conformance

SLURM = "slurm"  # itself; the session `server-slurm` starts it
OFTEN = {"campaign": {"launcher_options": {"poll_s": 0.05}}}
LOST = -int(signal.SIGKILL)
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
SAVES = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" + SLEEPS
DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS

pytestmark = pytest.mark.parametrize(
    "cluster",
    [pytest.param("stand-in", marks=pytest.mark.slow), pytest.param(SLURM, marks=pytest.mark.server)],
    indirect=True,
)


@pytest.fixture
def launchers(cluster):
    """`launchers(time="1")`: a launcher with these options, closed at the end."""
    made = []

    def make(**options):
        made.append(SlurmLauncher(Options(poll_s=0.05, **options), has_gpus=True, grace_s=30.0))
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()


@pytest.fixture
def start(launchers, tmp_path):
    """`start("print(1)", name="a", num_gpus=1)`: a Python program as a run, of one launcher for all."""
    launcher = launchers()

    def begin(program, *, name="a", on=launcher, **more):
        folder = tmp_path / "runs of ' $(the) campaign" / name
        folder.mkdir(parents=True, exist_ok=True)
        argv = (sys.executable, "-c", program)
        return on.start(Job(name=name, argv=argv, environ={"X": "it's $5"}, cwd=tmp_path, folder=folder, **more))

    return begin


def log_of(job, name="stdout.log"):
    file = job.folder / name
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("check", conformance("launcher", "slurm", config=OFTEN), ids=str)
def test_it_conforms(check, cluster):
    check()


def test_runs_that_start_together_are_one_array(start, wait_for, tmp_path):
    tells = "import os; print(os.getcwd(), os.environ['X'], os.environ['OMP_NUM_THREADS'])"
    jobs = [
        start(program, name=name) for name, program in {"a": tells, "b": "raise SystemExit(3)", "c": "1 / 0"}.items()
    ]
    wait_for(lambda: all(job.poll() is not None for job in jobs))
    assert [job.poll() for job in jobs] == [0, 3, 1]
    assert log_of(jobs[0]) == f"{tmp_path} it's $5 1\n"
    assert "ZeroDivisionError" in log_of(jobs[2], "stderr.log")
    assert [job.record.task for job in jobs] == [0, 1, 2]
    assert len({job.record.job_id for job in jobs}) == 1


def test_a_stop_is_a_sigterm_and_a_waiting_job_is_cancelled(start, wait_for, cluster):
    running = start(SAVES)
    wait_for(lambda: running.poll() is None and "up" in log_of(running))
    cluster.fill()
    waiting = [start(SLEEPS, name=name) for name in "bcd"]
    wait_for(lambda: waiting[2].record.job_id)
    running.stop()
    waiting[1].stop()
    wait_for(lambda: running.poll() is not None and waiting[1].poll() is not None)
    assert (running.poll(), waiting[1].poll()) == (EXIT_RESUMABLE, EXIT_RESUMABLE)
    assert (waiting[0].poll(), waiting[2].poll()) == (None, None)
    cluster.free()
    wait_for(lambda: "up" in log_of(waiting[2]) and "up" in log_of(waiting[0]))
    assert log_of(waiting[1]) == ""
    for job in waiting:
        job.kill()
    wait_for(lambda: all(job.poll() is not None for job in waiting))


def test_a_job_that_was_not_handed_in_is_taken_back(start, cluster):
    job = start(SLEEPS)
    job.stop()
    assert job.poll() == EXIT_RESUMABLE


@pytest.mark.timeout(400)
def test_a_time_limit_asks_first_and_is_no_failure(start, launchers, wait_for):
    limited = launchers(time="1")
    saves, deaf = start(SAVES, name="saves", on=limited), start(DEAF, name="deaf", on=limited)
    wait_for(lambda: all(job.poll() is not None for job in (saves, deaf)))
    assert (saves.poll(), deaf.poll()) == (EXIT_RESUMABLE, EXIT_RESUMABLE)
    assert "ended as TIMEOUT" in log_of(deaf, "stderr.log")


def test_a_lost_node_and_a_hand_of_somebody_else(start, wait_for, cluster):
    lost, cancelled = start(SLEEPS, name="lost"), start(SLEEPS, name="cancelled")
    wait_for(lambda: all(job.poll() is None and "up" in log_of(job) for job in (lost, cancelled)))
    wait_for(lambda: cancelled.record.job_id)  # a job may run before `sbatch` has told its id
    slurm_commands.cancel([cancelled.shown])
    wait_for(lambda: cancelled.poll() is not None)
    cluster.fail_node()
    wait_for(lambda: lost.poll() is not None)
    assert (lost.poll(), cancelled.poll()) == (LOST, -signal.SIGTERM)
    assert "ended as NODE_FAIL" in log_of(lost, "stderr.log")
    assert "ended as CANCELLED" in log_of(cancelled, "stderr.log")


def test_a_controller_that_is_away_is_waited_for(start, wait_for, cluster, tmp_path, caplog):
    gate = tmp_path / "gate"
    job = start(f"import os, time\nprint('up', flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.02)")
    wait_for(lambda: job.poll() is None and "up" in log_of(job))
    with caplog.at_level(logging.WARNING, "retrain"):
        cluster.stop_controller()
        late = start("print('late')", name="late")
        gate.touch()
        wait_for(lambda: job.poll() is None and late.poll() is None and "does not answer" in caplog.text)
        cluster.start_controller()
        wait_for(lambda: job.poll() is not None and late.poll() is not None)
    assert (job.poll(), late.poll(), log_of(late)) == (0, 0, "late\n")
    assert caplog.text.count("does not answer") == caplog.text.count("answers again") == 1


def test_another_session_finds_what_waits_and_runs(start, launchers, wait_for):
    done, running = start("print('up')", name="done"), start(SAVES, name="running")
    wait_for(lambda: done.poll() is not None and running.poll() is None and "up" in log_of(running))
    (running.folder / RECORD).write_text(json.dumps({"name": running.record.name, "task": 1, "job_id": ""}))
    later = launchers()  # as after a kill between `sbatch` and the id that it tells
    assert isinstance(later, FindsJobs)
    assert later.find("done", done.folder) is None
    assert later.find("never", done.folder.with_name("never")) is None
    found = later.find("running", running.folder)
    assert found.shown == running.shown
    found.stop()
    wait_for(lambda: found.poll() is not None)
    assert found.poll() == EXIT_RESUMABLE


def test_what_slurm_refuses_is_told(start, launchers, wait_for):
    job = start("1", on=launchers(partition="nowhere"))
    wait_for(lambda: job.poll() is not None)
    assert job.poll() == EXIT_USAGE
    assert "Slurm refuses the job" in log_of(job, "stderr.log")
    assert "nvalid partition" in log_of(job, "stderr.log")


def test_a_node_that_does_not_see_the_folder_says_so(start, wait_for, cluster):
    cluster.fill()
    job = start("1")
    wait_for(lambda: job.record.job_id)
    (job.folder / START).unlink()
    cluster.free()
    wait_for(lambda: job.poll() is not None)
    assert "does not see" in log_of(job, "stderr.log")


def test_secrets_are_in_no_script_and_in_no_command(start, wait_for, cluster):
    cluster.fill()
    job = start("import os; print(os.environ['X'])")
    file = job.folder / START
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    wait_for(lambda: job.record.job_id)
    told = [each.read_bytes() for each in cluster.folder.rglob("*") if each.is_file() and "munge" not in each.name]
    assert not any(b"it's $5" in text for text in told)
    cluster.free()
    wait_for(lambda: job.poll() is not None)
    assert log_of(job) == "it's $5\n"
    assert not file.exists()
