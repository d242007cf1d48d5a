"""The health monitors of a run: what they find is told once per episode, recorded each step, and may end the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.watchers import Finding, HealthMonitor
from retrain.kernel.errors import HealthError, Problem
from retrain.kernel.terminal_text import printable
from retrain.rooms.session.records.secrets import hide_text

LOG = logging.getLogger("retrain")
MAX_REASON_CHARS = 300
STOP = "stop"


def monitor_names(config: Config) -> list[str]:
    """The monitors that `[health]` asks for; none when nobody registered that table."""
    return list(dict.fromkeys(config.value("health.monitors", [])))


class HealthWatch:
    """Every monitor by its name.

    An episode of a finding begins with the step at which its monitor first reports it and ends with the first step at
    which it does not. Which episodes are open is part of the state, so a resumed run tells nothing twice. A monitor
    that raises is reported once and passed over for that step.
    """

    def __init__(self, monitors: Mapping[str, HealthMonitor], *, policy: str) -> None:
        self._monitors = dict(monitors)
        self._policy = policy
        self._open: dict[str, list[str]] = {}  # monitor -> states whose episode goes on
        self._ending: tuple[str, Finding] | None = None
        self._reported: set[str] = set()

    def observe(self, metrics: Mapping[str, Any]) -> dict[str, list[str]]:
        """Ask every monitor about a step; returns the field `health` for its line, nothing when all is well."""
        states: list[str] = []
        for name in self._monitors:
            findings = self._findings(name, metrics)
            if findings is None:
                continue
            before, self._open[name] = self._open.get(name, []), [finding.state for finding in findings]
            states += self._open[name]
            for finding in findings:
                if finding.state not in before:
                    self._begin(name, finding, metrics["step"])
        return {"health": list(dict.fromkeys(states))} if states else {}

    def refuse_to_go_on(self, step: int) -> None:
        """HealthError when an episode that began since the last call ends the run; the caller has saved before."""
        if self._ending is None:
            return
        (name, finding), self._ending = self._ending, None
        why = f"monitor {name!r} asks for it" if finding.severity == STOP else '[health] policy = "stop"'
        fix = 'do as it says and continue with `retrain --resume RUN`, or set [health] policy = "warn"'
        what = f"{finding.state}: {printable(finding.message)}"
        raise HealthError(Problem(where=f"step {step}", what=what, why=why, fix=fix))

    @property
    def ends_the_run(self) -> bool:
        """Whether `refuse_to_go_on` will raise."""
        return self._ending is not None

    def state(self) -> dict[str, Any]:
        """Open episodes and the state of each monitor, as JSON."""
        states = {name: self._state(name) for name in self._monitors}
        return {"open": dict(self._open), "monitors": {name: state for name, state in states.items() if state}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave; a monitor that is new in this run starts afresh."""
        self._open = {name: list(found) for name, found in state.get("open", {}).items() if name in self._monitors}
        for name, monitor in self._monitors.items():
            if name in state.get("monitors", {}):
                try:
                    monitor.restore(state["monitors"][name])
                except Exception as error:  # a fault of a monitor is never one of the run
                    self._report(name, "restore", error)

    def _begin(self, name: str, finding: Finding, step: int) -> None:
        LOG.warning("Health: %s at step %d: %s", finding.state, step, printable(finding.message))
        if self._ending is None and STOP in (self._policy, finding.severity):
            self._ending = name, finding

    def _findings(self, name: str, metrics: Mapping[str, Any]) -> list[Finding] | None:
        try:
            findings = list(self._monitors[name].observe(metrics))
            for finding in findings:
                if not isinstance(finding, Finding):
                    raise TypeError(f"observe() gave {type(finding).__name__}, not Finding")
            return findings
        except Exception as error:  # see above
            self._report(name, "observe", error)
            return None

    def _state(self, name: str) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(json.dumps(dict(self._monitors[name].state()), allow_nan=False))
            return state
        except Exception as error:  # see above; a checkpoint must not fail for it
            self._report(name, "state", error)
            return {}

    def _report(self, name: str, method: str, error: Exception) -> None:
        if name in self._reported:
            return
        self._reported.add(name)
        reason = printable(" ".join(hide_text(f"{type(error).__name__}: {error}").split())[:MAX_REASON_CHARS])
        LOG.warning(
            "Health monitor %r failed in %s(): %s. Training goes on without its findings.", name, method, reason
        )
        LOG.debug("Health monitor %r failed", name, exc_info=error)
