"""The monitor `default` and the watch of findings; the watchdog: heartbeats, deadlines, a process that ends anyway."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import StopRequested
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.observe.health.contract import Finding, HealthTable
from retrain.observe.health.monitors import DefaultMonitor, HealthWatch
from retrain.observe.watchdog.watchdog import DeadlineError, DeadlinesTable, Watchdog, watch_run
from retrain.records.record_names import HEARTBEAT, STACKS
from retrain.run.interrupts import Interrupts
from retrain.run.session import watching
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

GOOD: dict[str, Any] = {"useful_groups": 3, "all_wrong_groups": 1, "all_right_groups": 0, "tied_groups": 0}
GOOD |= {"no_verdict_groups": 0, "max_token_hit_rate": 0.1, "exec_entropy_mean": 0.5, "mean_tokens": 40.0}
GOOD |= {"ratio_mean": 1.0, "ratio_max": 1.01, "ess_frac": 1.0}
NONE_USEFUL = {"useful_groups": 0, "all_wrong_groups": 0}
SOLVED = NONE_USEFUL | {"all_right_groups": 4, "exec_entropy_mean": 0.01}  # certain, and no collapse
STUCK = {"useful_groups": 1, "all_wrong_groups": 3}
FAULTS = [
    ("truncation", {"max_token_hit_rate": 0.91}, "91 % of the completions", "[training] max_tokens"),
    ("no_useful_groups", NONE_USEFUL | {"all_wrong_groups": 4}, "12 all wrong", "easier tasks"),
    ("no_useful_groups", SOLVED, "12 all right", "harder tasks"),
    ("no_useful_groups", {"useful_groups": 0, "no_verdict_groups": 3}, "9 no verdict, 3 all wrong", "[reward] type"),
    ("no_useful_groups", NONE_USEFUL | {"tied_groups": 4}, "12 all same", "[training] group_size"),
    ("entropy_collapse", STUCK | {"exec_entropy_mean": 0.04}, "from 0.5 to 0.04", "[training] lr"),
    ("entropy_explosion", {"exec_entropy_mean": 2.6}, "from 0.5 to 2.6", "[training] lr"),
    ("length_drift", {"mean_tokens": 3.0}, "from 40.0 to 3.0", "[reward] type"),
    ("ratio_drift", {"ratio_mean": 1.2}, "ratio_mean 1.200", "[algorithm] tis_cap"),
    ("ratio_drift", {"ratio_mean": 0.8}, "ratio_mean 0.800", "[algorithm] tis_cap"),
    ("ratio_drift", {"ess_frac": 0.4}, "ess_frac 0.40", "[algorithm] tis_cap"),
]
EDGES: list[dict[str, Any]] = [
    *({"max_token_hit_rate": 0.9}, {"useful_groups": 1, "all_wrong_groups": 3}, {"mean_tokens": 4.0}),
    *({"exec_entropy_mean": 0.05} | STUCK, {"exec_entropy_mean": 0.01}, {"exec_entropy_mean": 2.5}),
    *({"ratio_mean": 1.0999}, {"ess_frac": 0.5}),
]


def monitor(**thresholds: Any) -> DefaultMonitor:
    return DefaultMonitor(HealthTable(**thresholds), max_tokens=64)


def states(watcher: DefaultMonitor, *steps: dict[str, Any]) -> list[list[str]]:
    return [[finding.state for finding in watcher.observe(GOOD | step)] for step in steps]


@pytest.mark.parametrize(("state", "fault", "cause", "fix"), FAULTS)
def test_a_fault_is_found_from_its_third_step_on(state: str, fault: dict[str, Any], cause: str, fix: str) -> None:
    watcher = monitor()
    assert states(watcher, {}, {}, {}, fault, fault) == [[]] * 5
    (finding,) = watcher.observe(GOOD | fault)
    assert (finding.state, finding.severity) == (state, "warn")
    assert finding.message.startswith("3 steps in a row: ")
    assert (cause in finding.message, fix in finding.message) == (True, True)
    assert states(watcher, fault, {}, fault, fault, fault) == [[state], [], [], [], [state]]


@pytest.mark.parametrize("edge", EDGES)
def test_the_threshold_itself_is_not_a_fault(edge: dict[str, Any]) -> None:
    assert states(monitor(), {}, {}, {}, edge, edge, edge, edge) == [[]] * 7


def test_surprisal_replaces_missing_entropy() -> None:
    watcher = monitor(steps=1)
    plain = {name: value for name, value in GOOD.items() if name != "exec_entropy_mean"}
    assert watcher.observe(plain | {"exec_surprisal_mean": 1.0}) == []
    assert [f.state for f in watcher.observe(plain | STUCK | {"exec_surprisal_mean": 0.01})] == ["entropy_collapse"]


def test_a_step_without_the_fields_neither_extends_nor_breaks_a_row() -> None:
    watcher, cut = monitor(), GOOD | {"max_token_hit_rate": 1.0}
    rejected = {"step": 2, "loss": None, "rejected": "logits of nan"}
    assert [bool(watcher.observe(step)) for step in (cut, rejected, cut, rejected, cut)] == [False] * 4 + [True]


def test_thresholds_of_zero_and_one_disable_a_fault() -> None:
    watcher = monitor(
        steps=1, truncation=1.0, entropy_collapse=0.0, entropy_explosion=0.0, length_collapse=0.0, ratio_drift=0.0,
        ess_frac=0.0,
    )  # fmt: skip
    worst = {"max_token_hit_rate": 1.0, "mean_tokens": 0.0, "ratio_mean": 9.0, "ess_frac": 0.01}
    assert states(watcher, {}, worst | {"exec_entropy_mean": 0.0}, worst | {"exec_entropy_mean": 90.0}) == [[]] * 3


STEP = st.fixed_dictionaries(
    {},
    optional={
        "max_token_hit_rate": st.sampled_from([0.0, 0.9, 1.0]),
        "useful_groups": st.sampled_from([0, 2]),
        "all_wrong_groups": st.integers(0, 4),
        "exec_entropy_mean": st.sampled_from([0.0, 0.01, 0.5, 5.0]),
        "mean_tokens": st.sampled_from([0.5, 40.0]),
        "ratio_mean": st.sampled_from([1.0, 1.5]),
        "ess_frac": st.sampled_from([0.1, 1.0]),
    },
)


@given(st.lists(STEP, max_size=12), st.integers(0, 12))
def test_a_resumed_monitor_finds_the_same(steps: list[dict[str, Any]], cut: int) -> None:
    whole = monitor()
    wanted = [whole.observe(step) for step in steps]
    first, second = monitor(), monitor()
    found = [first.observe(step) for step in steps[:cut]]
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert found + [second.observe(step) for step in steps[cut:]] == wanted


class Scripted:
    """A monitor that finds what its script says for the step."""

    def __init__(self, *script: Any, severity: Any = "warn") -> None:
        self.script, self.severity, self.count = script, severity, 0

    def observe(self, metrics: Mapping[str, Any]) -> Sequence[Finding]:
        found = self.script[metrics["step"]]
        self.count += 1
        if isinstance(found, Exception):
            raise found
        return [Finding(state=s, message=f"{s}\x1b[2J; fix: x", severity=self.severity) for s in found]

    def state(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def fields(watch: HealthWatch, steps: Sequence[int]) -> list[list[str]]:
    return [watch.step_line({"step": step}).get("health", []) for step in steps]


def test_an_episode_is_logged_once_and_recorded_throughout(caplog: pytest.LogCaptureFixture) -> None:
    watch = HealthWatch({"m": Scripted([], ["a"], ["a", "b"], [], ["a"])}, policy="warn")
    with caplog.at_level(logging.WARNING, logger="retrain"):
        assert fields(watch, range(5)) == [[], ["a"], ["a", "b"], [], ["a"]]
    told = [record.getMessage().split(":")[1].strip() for record in caplog.records]
    assert told == ["a at step 1", "b at step 2", "a at step 4"]
    assert "\x1b" not in caplog.text
    assert watch.retrain_step_end({"step": 4}) is None
    for monitors in ({"m": Scripted([])}, {}):
        assert HealthWatch(monitors, policy="stop").step_line({"step": 0}) == {}


@pytest.mark.parametrize(("policy", "severity", "ends"), [
    ("warn", "warn", False), ("warn", "stop", True), ("stop", "warn", True), ("stop", "stop", True),
])  # fmt: skip
def test_policy_or_severity_end_the_run_once_per_episode(policy: str, severity: str, ends: bool) -> None:
    watch = HealthWatch({"m": Scripted(["a"], ["a"], severity=severity)}, policy=policy)
    watch.step_line({"step": 0})
    ending = watch.retrain_step_end({"step": 0})
    assert (ending is not None) is ends
    if ending is not None:
        assert codes_in(ending) == ["run.unhealthy"]
        assert str(ending).startswith("step 0: health finding a: a\ufffd")
        assert (ending.label, ending.exit_code) == ("health", 1)
    watch.step_line({"step": 1})
    assert watch.retrain_step_end({"step": 1}) is None, "whoever resumes knows of it"


def test_a_broken_monitor_is_named_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Scripted):
        def observe(self, metrics: Mapping[str, Any]) -> Sequence[Finding]:
            return ["not a finding"]  # type: ignore[list-item]

        def state(self) -> Mapping[str, Any]:
            return {"x": float("nan")}

    monitors = {"bad": Scripted(*[ValueError("no\x1b[2J")] * 3), "odd": Odd(), "good": Scripted(["a"], ["a"], ["a"])}
    watch = HealthWatch(monitors, policy="warn")
    with caplog.at_level(logging.WARNING, logger="retrain"):
        assert fields(watch, range(3)) == [["a"]] * 3
        json.dumps(watch.retrain_save_state(), allow_nan=False)
    assert caplog.text.count("'bad' failed in observe(): ValueError: no") == 1
    assert caplog.text.count("'odd' failed in observe(): TypeError") == 1
    assert "\x1b" not in caplog.text


def test_a_resumed_watch_logs_nothing_twice(caplog: pytest.LogCaptureFixture) -> None:
    script = (["a"], ["a"], [], ["a"])
    first = HealthWatch({"m": Scripted(*script)}, policy="stop")
    first.step_line({"step": 0})
    resumed = HealthWatch({"m": Scripted(*script), "new": Scripted([], [], [], [])}, policy="stop")
    resumed.retrain_load_state(json.loads(json.dumps(first.retrain_save_state())))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="retrain"):
        assert fields(resumed, [1, 2, 3]) == [["a"], [], ["a"]]
    assert [record.getMessage()[:18] for record in caplog.records] == ["Health: a at step "]
    HealthWatch({"m": Scripted()}, policy="warn").retrain_load_state({})


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


def test_an_expired_phase_is_stopped(tmp_path: Path, plugins: Plugins, capsys: pytest.CaptureFixture[str]) -> None:
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
