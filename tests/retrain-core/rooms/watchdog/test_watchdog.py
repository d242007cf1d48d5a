"""The watchdog: heartbeats, deadlines of phases, and a process that ends even if its main thread does not listen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from retrain.kernel.config.schema import DeadlinesTable
from retrain.kernel.errors import DeadlineError, StopRequested
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.session.interrupts import Interrupts
from retrain.rooms.watchdog.watchdog import HEARTBEAT, STACKS, Watchdog

GRACE_S = 60.0
DEAF = """
import signal, sys, time
from pathlib import Path
from retrain.kernel.config.schema import DeadlinesTable
from retrain.rooms.session.interrupts import Interrupts
from retrain.rooms.watchdog.watchdog import Watchdog
from retrain.kernel.plugins.manager import load_plugins

interrupts = Interrupts(grace_s=0.5)
interrupts.may_resume()
watchdog = Watchdog(DeadlinesTable(scoring_s=0.2), Path(sys.argv[1]), interrupts)
with interrupts.installed(), watchdog.running(load_plugins({})):
    if sys.argv[2] == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    watchdog.retrain_phase(step=3, phase="scoring")
    with interrupts.shield():
        time.sleep(1000)
"""


def wait_for(path: Path) -> None:
    """Until a file exists; the test's own time limit ends it otherwise."""
    while not path.exists():
        time.sleep(0.02)


def sleep_for_ever(plugins: Plugins, step: int) -> None:
    plugins.notify("retrain_phase", run=None, step=step, phase="scoring")
    while True:
        time.sleep(1000)


def test_an_expired_phase_is_named_with_its_stacks_and_stopped(
    tmp_path: Path, plugins: Plugins, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupts = Interrupts(grace_s=GRACE_S)
    watchdog = Watchdog(DeadlinesTable(scoring_s=0.3, sampling_s=0.0), tmp_path, interrupts)
    with interrupts.installed(), watchdog.running(plugins), pytest.raises(StopRequested) as caught:
        sleep_for_ever(plugins, step=7)
    failure = caught.value.failure
    assert isinstance(failure, DeadlineError)
    assert failure.exit_code == 1
    assert "step 7, scoring: the phase took longer than [deadlines] scoring_s = 0.3" in str(failure)
    stacks = (tmp_path / STACKS).read_text(encoding="utf-8")
    assert "step 7, scoring" in stacks
    assert "in sleep_for_ever" in stacks
    assert "in sleep_for_ever" in capsys.readouterr().err


def test_phases_without_a_deadline_or_in_time_go_on(tmp_path: Path, plugins: Plugins) -> None:
    interrupts = Interrupts(grace_s=GRACE_S)
    table = DeadlinesTable(sampling_s=0.001, training_s=1000.0, heartbeat_s=0.01)
    watchdog = Watchdog(table, tmp_path, interrupts)
    with interrupts.installed(), watchdog.running(plugins):
        for phase in ("scoring", "recording", "training", "of a plugin"):
            plugins.notify("retrain_phase", run=None, step=0, phase=phase)
            beat = tmp_path / HEARTBEAT
            wait_for(beat)
            beat.unlink()
            wait_for(beat)
    assert not interrupts.reason
    assert not (tmp_path / STACKS).exists()


def test_a_heartbeat_says_who_is_where(tmp_path: Path, plugins: Plugins) -> None:
    watchdog = Watchdog(DeadlinesTable(heartbeat_s=0.01), tmp_path, Interrupts(grace_s=GRACE_S))
    with watchdog.running(plugins):
        plugins.notify("retrain_phase", run=None, step=4, phase="sampling")
        (tmp_path / HEARTBEAT).unlink(missing_ok=True)
        wait_for(tmp_path / HEARTBEAT)
        beat = json.loads((tmp_path / HEARTBEAT).read_text())
    assert set(beat) == {"time", "pid", "step", "phase", "phase_elapsed_s"}
    assert beat["pid"] == os.getpid()
    assert beat["phase_elapsed_s"] >= 0.0
    last = json.loads((tmp_path / HEARTBEAT).read_text())
    assert (last["step"], last["phase"]) == (4, "ended")
    assert {path.name for path in tmp_path.iterdir()} == {HEARTBEAT}


def test_nothing_to_watch_starts_no_thread(tmp_path: Path, plugins: Plugins) -> None:
    watchdog = Watchdog(DeadlinesTable(heartbeat_s=0.0), tmp_path, Interrupts(grace_s=GRACE_S))
    with watchdog.running(plugins):
        assert not [thread for thread in threading.enumerate() if thread.name == "retrain-watchdog"]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_harms_nothing(tmp_path: Path, plugins: Plugins) -> None:
    interrupts = Interrupts(grace_s=GRACE_S)
    watchdog = Watchdog(DeadlinesTable(scoring_s=0.05, heartbeat_s=0.01), tmp_path / "gone", interrupts)
    with interrupts.installed(), watchdog.running(plugins), pytest.raises(StopRequested):
        sleep_for_ever(plugins, step=0)


def test_the_watchdog_is_forgotten_when_the_run_is_over(tmp_path: Path, plugins: Plugins) -> None:
    watchdog = Watchdog(DeadlinesTable(), tmp_path, Interrupts(grace_s=GRACE_S))
    for _ in range(2):
        with watchdog.running(plugins):
            assert plugins.pluggy.is_registered(watchdog)
        assert not plugins.pluggy.is_registered(watchdog)


@pytest.mark.parametrize("how", ["deaf", "shielded"])
def test_a_main_thread_that_does_not_react_is_left_with_exit_code_1(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", DEAF, str(tmp_path), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "step 3, scoring: the phase took longer than [deadlines] scoring_s = 0.2" in result.stderr
    assert "not stopped within 0.5 s: leaving" in result.stderr
