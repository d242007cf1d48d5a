"""The watchdog: heartbeats, deadlines of phases, and a process that ends even if its main thread does not react."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import StopRequested
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.observe.watchdog.watchdog import DeadlineError, DeadlinesTable, Watchdog, watch_run
from retrain.records.record_names import HEARTBEAT, STACKS
from retrain.run.interrupts import Interrupts
from retrain.run.session import watching
from tests.kit.shared import first_or_long

GRACE_S = 60.0
DEAF = """
import signal, sys, time
from pathlib import Path
from retrain.observe.watchdog.watchdog import DeadlinesTable, Watchdog
from retrain.run.interrupts import Interrupts
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.session import watching
from types import SimpleNamespace

interrupts = Interrupts(grace_s=0.5)
interrupts.may_resume()
watchdog = Watchdog(DeadlinesTable(scoring_s=0.2), interrupts.fail)
with interrupts.installed(), watching(load_plugins({}), [watchdog]):
    watchdog.retrain_run_start(SimpleNamespace(folder=Path(sys.argv[1])))
    if sys.argv[2] == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    watchdog.phase(step=3, phase="scoring")
    with interrupts.shield():
        time.sleep(1000)
"""


@contextmanager
def running(watchdog: Watchdog, folder: Path, plugins: Plugins) -> Iterator[None]:
    """A run in `folder` from its start to its end, as the watchdog's hooks see it."""
    view: Any = SimpleNamespace(folder=folder)
    with watching(plugins, [watchdog]):
        watchdog.retrain_run_start(view)
        try:
            yield
        finally:
            watchdog.retrain_run_end()


def wait_for(path: Path) -> None:
    """Wait until a file exists; the test's own time limit ends the wait otherwise."""
    while not path.exists():
        time.sleep(0.02)


def sleep_for_ever(watchdog: Watchdog, step: int) -> None:
    watchdog.phase(step, "scoring")
    while True:
        time.sleep(1000)


def test_an_expired_phase_is_named_and_stopped(
    tmp_path: Path, plugins: Plugins, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupts = Interrupts(grace_s=GRACE_S)
    watchdog = Watchdog(DeadlinesTable(scoring_s=0.3, sampling_s=0.0), interrupts.fail)
    with interrupts.installed(), running(watchdog, tmp_path, plugins), pytest.raises(StopRequested) as caught:
        sleep_for_ever(watchdog, step=7)
    failure = caught.value.failure
    assert isinstance(failure, DeadlineError)
    assert (failure.codes, failure.exit_code) == (["run.deadline"], 1)
    assert not plugins.pluggy.is_registered(watchdog)
    assert not [thread for thread in threading.enumerate() if thread.name == "retrain-watchdog"]
    assert "step 7, scoring: the phase took longer than [deadlines] scoring_s = 0.3" in str(failure)
    stacks = (tmp_path / STACKS).read_text(encoding="utf-8")
    assert [part for part in ("step 7, scoring", "in sleep_for_ever") if part not in stacks] == []
    assert "in sleep_for_ever" in capsys.readouterr().err


def test_phases_in_time_go_on_and_a_folder_that_is_gone_harms_nothing(tmp_path: Path, plugins: Plugins) -> None:
    interrupts = Interrupts(grace_s=GRACE_S)
    table = DeadlinesTable(sampling_s=0.001, training_s=1000.0, heartbeat_s=0.01)
    watchdog = Watchdog(table, interrupts.fail)
    with interrupts.installed(), running(watchdog, tmp_path, plugins):
        for phase in ("scoring", "recording", "training", "of a plugin"):
            watchdog.phase(0, phase)
            beat = tmp_path / HEARTBEAT
            wait_for(beat)
            beat.unlink()
            wait_for(beat)
    assert not interrupts.reason
    assert not (tmp_path / STACKS).exists()
    watchdog = Watchdog(DeadlinesTable(scoring_s=0.05, heartbeat_s=0.01), interrupts.fail)
    with interrupts.installed(), running(watchdog, tmp_path / "gone", plugins), pytest.raises(StopRequested):
        sleep_for_ever(watchdog, step=0)


def test_a_heartbeat_says_how_far_its_phase_is(tmp_path: Path, plugins: Plugins, load: Callable[..., Any]) -> None:
    config, _ = load("[deadlines]\nheartbeat_s = 0.01\n")
    context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins)
    watchdog = watch_run(context)
    assert watchdog is not None

    def beat_of(phase: str) -> dict[str, Any]:
        watchdog.phase(4, phase)
        for _ in range(2):  # the first may have been under way
            (tmp_path / HEARTBEAT).unlink(missing_ok=True)
            wait_for(tmp_path / HEARTBEAT)
        beat: dict[str, Any] = json.loads((tmp_path / HEARTBEAT).read_text())
        return beat

    with running(watchdog, tmp_path, plugins):
        context.training_progress.begin("packs", 4)
        context.training_progress.add(1, tokens=100)
        assert "progress" not in beat_of("sampling")
        progress = beat_of("training")["progress"]
        beat = beat_of("checkpoint")
    assert set(beat) == {"time", "pid", "step", "phase", "phase_elapsed_s"}
    assert (beat["pid"], beat["step"], beat["phase"]) == (os.getpid(), 4, "checkpoint")
    assert beat["phase_elapsed_s"] >= 0.0
    assert progress.items() >= {"unit": "packs", "done": 1, "total": 4, "tokens": 100}.items()
    assert (progress["tokens_per_s"] > 0, progress["time_left_s"] >= 0) == (True, True)
    last = json.loads((tmp_path / HEARTBEAT).read_text())
    assert (last["step"], last["phase"], "progress" in last) == (4, "ended", False)


def test_there_is_no_watchdog_when_there_is_nothing_to_watch(load: Callable[..., Any], plugins: Plugins) -> None:
    def watched(text: str) -> Watchdog | None:
        config, problems = load(f"[deadlines]\n{text}\n")
        assert problems == []
        return watch_run(PluginContext(config=config, seeds=Seeds(1), plugins=plugins))

    assert watched("heartbeat_s = 0.0") is None
    assert watched("heartbeat_s = 0.0\neval_s = 9.0") is not None
    assert watched("") is not None
    assert not [thread for thread in threading.enumerate() if thread.name == "retrain-watchdog"]


@pytest.mark.parametrize("how", first_or_long(["deaf", "shielded"]))
def test_a_main_thread_that_does_not_react_is_left_with_exit_code_1(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", DEAF, str(tmp_path), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "step 3, scoring: the phase took longer than [deadlines] scoring_s = 0.2" in result.stderr
    assert "not stopped within 0.5 s: leaving" in result.stderr
