"""The health monitors of a run: a finding is logged once per episode, recorded each step, and may end the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.contracts.views import Watcher
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.build import build_part
from retrain.kernel.types import Kind
from retrain.observe.health.contract import Finding, HealthMonitor, HealthTable
from retrain.run.fault_guard import FaultGuard
from retrain.text.terminal_text import printable

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext

LOG = logging.getLogger("retrain")
STATE = "health"
STOP = "stop"


class HealthError(RetrainError, RuntimeError):
    """A health monitor judged the run not worth continuing; its state is saved."""

    label = "health"


def watch_run(context: PluginContext) -> HealthWatch | None:
    """The monitors that `[health]` names."""
    table = context.config.table("health", HealthTable)
    names = dict.fromkeys(table.monitors)
    monitors = {name: build_part(Kind.HEALTH_MONITOR, name, "health.monitors", context) for name in names}
    return HealthWatch(monitors, policy=table.policy) if monitors else None


class HealthWatch(Watcher):
    """Every monitor by its name.

    An episode of a finding begins with the step at which its monitor first reports it and ends with the first step at
    which it does not. Open episodes are part of the state, so a resumed run logs each only once. A monitor that raises
    is reported once and skipped for that step.
    """

    def __init__(self, monitors: Mapping[str, HealthMonitor], *, policy: str) -> None:
        self._monitors = dict(monitors)
        self._policy = policy
        self._open: dict[str, list[str]] = {}  # monitor -> states whose episode is open
        self._ending: tuple[str, Finding] | None = None
        self._guard = FaultGuard("Health monitor", "Training continues without its findings.")

    def step_line(self, metrics: Mapping[str, Any]) -> dict[str, list[str]]:
        """Let every monitor examine a step; return the field `health` for its line, or {} when nothing is wrong.

        Monitors judge what is sampled: they do not see a warm-up.
        """
        if metrics["step"] < 0:
            return {}
        states: list[str] = []
        for name, monitor in self._monitors.items():
            has_answered, findings = self._guard.call(name, "observe", _findings, monitor, metrics)
            if not has_answered:
                continue
            before, self._open[name] = self._open.get(name, []), [finding.state for finding in findings]
            states += self._open[name]
            for finding in findings:
                if finding.state not in before:
                    self._begin(name, finding, metrics["step"])
        return {"health": list(dict.fromkeys(states))} if states else {}

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> HealthError | None:
        """The error that ends the run, for an episode that began since the last call and is to end the run."""
        if self._ending is None:
            return None
        (name, finding), self._ending = self._ending, None
        why = f"monitor {name!r} requires it" if finding.severity == STOP else '[health] policy = "stop"'
        fix = 'apply its fix and continue with `retrain --resume RUN`, or set [health] policy = "warn"'
        what = f"{finding.state}: {printable(finding.message)}"
        return HealthError(Problem(where=f"step {metrics['step']}", what=what, why=why, fix=fix))

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        """Open episodes and the state of each monitor."""
        states = {name: self._guard.state(name, monitor.state) for name, monitor in self._monitors.items()}
        return {STATE: {"open": dict(self._open), "monitors": {name: s for name, s in states.items() if s}}}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved; a monitor that is new in this run starts afresh."""
        saved = state.get(STATE, {})
        self._open = {name: list(found) for name, found in saved.get("open", {}).items() if name in self._monitors}
        for name, monitor in self._monitors.items():
            if name in saved.get("monitors", {}):
                self._guard.call(name, "restore", monitor.restore, saved["monitors"][name])

    def _begin(self, name: str, finding: Finding, step: int) -> None:
        LOG.warning("Health: %s at step %d: %s", finding.state, step, printable(finding.message))
        if self._ending is None and STOP in (self._policy, finding.severity):
            self._ending = name, finding


def _findings(monitor: HealthMonitor, metrics: Mapping[str, Any]) -> list[Finding]:
    findings = list(monitor.observe(metrics))
    for finding in findings:
        if not isinstance(finding, Finding):
            raise TypeError(f"observe() returned {type(finding).__name__}, not Finding")
    return findings
