"""Findings are logged once per episode, recorded at each step, and end the run only if configured to."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from retrain.observe.health.contract import Finding
from retrain.observe.health.monitors import HealthWatch
from tests.kit.problems import codes_in


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


def test_a_healthy_step_has_no_field() -> None:
    assert HealthWatch({"m": Scripted([])}, policy="stop").step_line({"step": 0}) == {}
    assert HealthWatch({}, policy="stop").step_line({"step": 0}) == {}


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
    messages = [record.getMessage() for record in caplog.records]
    assert sum("'bad' failed in observe(): ValueError: no" in message for message in messages) == 1
    assert sum("'odd' failed in observe(): TypeError" in message for message in messages) == 1
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
