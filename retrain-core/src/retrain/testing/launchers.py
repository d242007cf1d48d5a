"""The suite of launchers: start a process as its job says, report its end, and stop it with its children."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.campaign.launching import Job
from retrain.kernel.errors import BackendError
from retrain.records.runs.run_status import process_is_alive
from retrain.testing.bench import Bench
from retrain.testing.check import expect

# Generous: a scheduler or a loaded machine takes its time to start a process.
WAIT_S = 60.0
PAUSE_S = 0.02
# Neither 0 nor 1: a launcher that maps every failure to 1 would pass with 1.
CODE = 3
TELLS = "import os, sys; print(os.environ['GREETING'], os.getcwd()); print('careful', file=sys.stderr); sys.exit(3)"
STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print('up', flush=True)
time.sleep(600)
"""
HAS_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print('up', child.pid, flush=True)
time.sleep(600)
"""


def runs_a_process_to_its_end(bench: Bench) -> None:
    """`start` returns at once; `poll` returns None while the process runs and its exit code after that."""
    code = _ended(_launcher(bench).start(_job(bench, TELLS)))
    why = "by the exit code a campaign distinguishes runs that are done, have failed or can be resumed"
    fix = "pass the exit code of the process on in poll()"
    expect(code == CODE, f"a process that exited with {CODE} ended as {code!r}", why=why, fix=fix)


def gives_it_environment_folder_and_logs(bench: Bench) -> None:
    """The process sees `environ`, runs in `cwd`, and its output is appended to the logs in `folder`."""
    job, launcher = _job(bench, TELLS), _launcher(bench)
    for _ in range(2):
        _ended(launcher.start(job))
    out, err = (_text(job.folder / name) for name in ("stdout.log", "stderr.log"))
    wanted = f"hello {job.cwd.resolve()}"
    expect(
        out.split("\n").count(wanted) == 2,
        f"stdout.log holds {out!r:.300} after two runs that print {wanted!r}",
        why="a run needs its own settings and finds its data in cwd; logs of earlier attempts must stay readable",
        fix="pass environ over os.environ and cwd to the process, and open the logs for appending",
    )
    why, fix = "the reason of a failed run is read from it", "append the process's stderr to <folder>/stderr.log"
    expect(err.count("careful") == 2, f"stderr.log holds {err!r:.300}", why=why, fix=fix)


def asks_it_to_stop(bench: Bench) -> None:
    """`stop` sends SIGTERM and returns; the process may save its state and choose its exit code."""
    job = _job(bench, STOPS)
    running = _launcher(bench).start(job)
    _wait_for(lambda: "up" in _text(job.folder / "stdout.log"), "the process to print")
    why, fix = "a campaign would move on", "return None"
    expect(running.poll() is None, "poll() is not None while the process runs", why=why, fix=fix)
    running.stop()
    code = _ended(running)
    why = "75 means that the state is saved and the run can be resumed"
    fix = "send SIGTERM to the process itself in stop(), and wait for it in poll()"
    # A campaign resumes runs that end with 75, and counts other non-zero codes as failures.
    expect(code == 75, f"a process that answers SIGTERM with exit code 75 ended as {code!r}", why=why, fix=fix)
    running.stop()


def kills_it_with_all_it_started(bench: Bench) -> None:
    """`kill` ends the process and its children, and `poll` returns a non-zero code."""
    job = _job(bench, HAS_CHILD)
    running = _launcher(bench).start(job)
    _wait_for(lambda: "up " in _text(job.folder / "stdout.log"), "the process to start a child")
    child = int(_text(job.folder / "stdout.log").split()[1])
    running.kill()
    code = _ended(running)
    why, fix = "0 would mean that the run is done", "return the negative number of the signal"
    expect(isinstance(code, int) and code != 0, f"a killed process ended as {code!r}", why=why, fix=fix)
    running.kill()
    # It runs on another machine, whose processes cannot be seen from here.
    if running.pid is None:
        return
    # A child that the launcher missed would sleep on for ten minutes.
    try:
        _wait_for(lambda: not process_is_alive(child), "the child of a killed process to end")
    finally:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)


def runs_several_at_a_time(bench: Bench) -> None:
    """Jobs run side by side, and each has its own logs."""
    launcher = _launcher(bench)
    slow = _job(bench, STOPS, name="slow")
    quick = _job(bench, TELLS, name="quick")
    waiting, ending = launcher.start(slow), launcher.start(quick)
    expect(
        _ended(ending) == CODE, "the second job did not end by itself", why="runs are side by side", fix="start each"
    )
    why, fix = "runs are apart", "use job.folder"
    expect("careful" in _text(quick.folder / "stderr.log"), "its logs are missing", why=why, fix=fix)
    waiting.kill()
    _ended(waiting)


def tells_of_a_program_that_is_not_there(bench: Bench) -> None:
    """A command that cannot be started raises BackendError, or its job ends with a non-zero code."""
    job = _job(bench, "")
    try:
        running = _launcher(bench).start(replace(job, argv=(str(bench.folder / "no-such-program"),), environ={}))
    except BackendError:
        return
    what = "a program that does not exist ended with 0"
    expect(_ended(running) != 0, what, why="0 means that the run is done", fix="return 127")


def lets_go(bench: Bench) -> None:
    """`close` works when no job was started, and after one has ended."""
    bench.build().close()
    launcher = bench.build()
    _ended(launcher.start(_job(bench, TELLS)))
    launcher.close()


def _launcher(bench: Bench) -> Any:
    launcher = bench.build()
    bench.closing(launcher.close)
    return launcher


def _job(bench: Bench, program: str, *, name: str = "job") -> Job:
    folder, cwd = bench.folder / name, bench.folder / "cwd"
    folder.mkdir(exist_ok=True)
    cwd.mkdir(exist_ok=True)
    argv = (sys.executable, "-c", program)
    return Job(name=name, argv=argv, environ={"GREETING": "hello"}, cwd=cwd, folder=folder)


def _ended(running: Any) -> Any:
    try:
        code = _wait_for(running.poll, "poll() to return the exit code")
    except BaseException:
        # A process that outlives its check would keep the folder of the bench in use.
        running.kill()
        raise
    again = running.poll()
    why, fix = "a campaign may call it more than once", "keep the code"
    expect(again == code, f"poll() returned {code!r}, then {again!r}", why=why, fix=fix)
    return code


def _wait_for(value: Callable[[], Any], what: str) -> Any:
    """Return the value once it is neither None nor False."""
    end = time.monotonic() + WAIT_S
    while (found := value()) is None or found is False:
        why = "a campaign would wait forever"
        fix = "let start() start the process at once, and stop() and kill() reach it"
        expect(time.monotonic() < end, f"waited {WAIT_S:g} s for {what}", why=why, fix=fix)
        time.sleep(PAUSE_S)
    return found


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""
