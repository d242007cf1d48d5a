"""The health monitors of a run: a watch that runs them at each step, and the monitors `default` and `gaming`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.views import Watcher
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.types import Kind
from retrain.observe.health.contract import Finding, HealthMonitor, HealthTable
from retrain.records.record_names import GENERATIONS
from retrain.run.fault_guard import FaultGuard
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
STATE = "health"
STOP = "stop"


class HealthError(RetrainError, RuntimeError):
    """A health monitor judged the run not worth continuing; its state is saved."""

    label = "health"


def watch_run(context: PluginContext) -> HealthWatch | None:
    table = context.config.table("health", HealthTable)
    names = dict.fromkeys(table.monitors)
    monitors = {name: build_part(Kind.HEALTH_MONITOR, name, "health.monitors", context) for name in names}
    return HealthWatch(monitors, policy=table.policy) if monitors else None


class HealthWatch(Watcher):
    """Runs every monitor at each step; a finding is logged once per episode, recorded each step, and may end the run.

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
        """The field `health` of a step's line, absent without a finding. Monitors do not see a warm-up."""
        if metrics["step"] < 0:
            return {}
        states: list[str] = []
        for name, monitor in self._monitors.items():
            has_answered, findings = self._guard.call(name, "observe", _findings, monitor, metrics)
            if not has_answered:
                continue
            before, self._open[name] = self._open.get(name, []), [finding.state for finding in findings]
            states += self._open[name]
            for finding in (each for each in findings if each.state not in before):
                LOG.warning("Health: %s at step %d: %s", finding.state, metrics["step"], printable(finding.message))
                if self._ending is None and STOP in (self._policy, finding.severity):
                    self._ending = name, finding
        return {"health": list(dict.fromkeys(states))} if states else {}

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> HealthError | None:
        if self._ending is None:
            return None
        # Once per episode: a user who resumes the run already knows of it.
        (name, finding), self._ending = self._ending, None
        why = f"monitor {name!r} requires it" if finding.severity == STOP else '[health] policy = "stop"'
        fix = 'apply its fix and continue with `retrain --resume RUN`, or set [health] policy = "warn"'
        where, what = f"step {metrics['step']}", f"health finding {finding.state}: {printable(finding.message)}"
        return HealthError(Problem(code="run.unhealthy", where=where, what=what, why=why, fix=fix))

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        states = {name: self._guard.state(name, monitor.state) for name, monitor in self._monitors.items()}
        return {STATE: {"open": dict(self._open), "monitors": {name: s for name, s in states.items() if s}}}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(STATE, {})
        self._open = {name: list(found) for name, found in saved.get("open", {}).items() if name in self._monitors}
        for name, monitor in self._monitors.items():
            if name in saved.get("monitors", {}):
                self._guard.call(name, "restore", monitor.restore, saved["monitors"][name])


def _findings(monitor: HealthMonitor, metrics: Mapping[str, Any]) -> list[Finding]:
    findings = list(monitor.observe(metrics))
    for finding in findings:
        if not isinstance(finding, Finding):
            raise TypeError(f"observe() returned {type(finding).__name__}, not Finding")
    return findings


Metrics = Mapping[str, Any]
# The fault of a step: "" without one, None when the step lacks the fields.
Verdict = str | None
CAUSES = {"all_wrong_groups": "all wrong", "all_right_groups": "all right", "no_verdict_groups": "no verdict"}
CAUSES |= {"tied_groups": "all same"}
STUCK = ("all_wrong_groups", "tied_groups", "no_verdict_groups")
FIXES = {
    "all_wrong_groups": "use easier tasks ([data]), or raise [training] group_size or max_tokens; check that the "
    f"verifier ([reward] type) can parse the answers: see completion and reference in {GENERATIONS}",
    "all_right_groups": "use harder tasks ([data]); the model solves these already",
    "no_verdict_groups": f"check [reward] type: it gave no verdict on the completions in {GENERATIONS}, "
    "or [training] group_size is 1",
    "tied_groups": "raise [training] group_size, or use a [reward] type that distinguishes answers",
}


def build(context: PluginContext) -> DefaultMonitor:
    return DefaultMonitor(context.config.table("health", HealthTable), max_tokens=context.config.training.max_tokens)


class DefaultMonitor:
    """Reports a finding from the `steps`-th step in a row with its fault until a step without it.

    A step that lacks the fields of a fault (such as a rejected one) neither extends nor breaks the row. The entropy is
    `exec_entropy_mean`, or its estimate `exec_surprisal_mean` if the backend reports no entropies. The starts of
    entropy and mean length are means over the first `steps` steps that have them. An entropy collapse counts only while
    more groups are stuck (all wrong, all the same, no verdict) than useful: otherwise the task is just being solved.
    """

    def __init__(self, table: HealthTable, *, max_tokens: int) -> None:
        self._table = table
        self._max_tokens = max_tokens
        self._rows: dict[str, int] = {}  # fault -> steps in a row
        self._causes: dict[str, int] = {}  # field -> groups, over the row without a useful one
        self._starts: dict[str, list[float]] = {"entropy": [], "length": []}
        self._judges: dict[str, Callable[[Metrics], Verdict]] = {
            "truncation": self._truncation,
            "no_useful_groups": self._no_useful_groups,
            "entropy_collapse": self._entropy_collapse,
            "entropy_explosion": self._entropy_explosion,
            "length_drift": self._length_drift,
            "ratio_drift": self._ratio_drift,
        }

    def observe(self, metrics: Metrics) -> list[Finding]:
        for name, starts in self._starts.items():
            value = _measure(metrics, name)
            if value is not None and len(starts) < self._table.steps:
                starts.append(float(value))
        findings = []
        for state, judge in self._judges.items():
            verdict = judge(metrics)
            if verdict is None:
                continue
            steps = self._rows[state] = self._rows.get(state, 0) + 1 if verdict else 0
            if steps >= self._table.steps:
                findings.append(Finding(state=state, message=f"{steps} steps in a row: {verdict}"))
        return findings

    def state(self) -> dict[str, Any]:
        return {"rows": dict(self._rows), "causes": dict(self._causes), "starts": dict(self._starts)}

    def restore(self, state: Metrics) -> None:
        self._rows, self._causes = dict(state["rows"]), dict(state["causes"])
        self._starts |= {name: list(values) for name, values in state["starts"].items()}

    def _truncation(self, metrics: Metrics) -> Verdict:
        share = metrics.get("max_token_hit_rate")
        if share is None or share <= self._table.truncation:
            return None if share is None else ""
        cause = f"{100 * share:.0f} % of the completions were cut off before their answer ended"
        return f"{cause} ([training] max_tokens = {self._max_tokens}); fix: raise [training] max_tokens"

    def _no_useful_groups(self, metrics: Metrics) -> Verdict:
        useful = metrics.get("useful_groups")
        if useful is None:
            return None
        if useful:
            self._causes = {}
            return ""
        self._causes = {field: self._causes.get(field, 0) + metrics.get(field, 0) for field in CAUSES}
        ranked = sorted((field for field in CAUSES if self._causes[field]), key=lambda field: -self._causes[field])
        counts = ", ".join(f"{self._causes[field]} {CAUSES[field]}" for field in ranked)
        return f"no group carried a training signal ({counts}); fix: {FIXES[ranked[0]]}" if ranked else ""

    def _entropy_collapse(self, metrics: Metrics) -> Verdict:
        if (found := self._since_start(metrics, "entropy")) is None:
            return None
        value, start = found
        # A solved task has little entropy left as well, and nothing is wrong then.
        stuck = sum(metrics.get(field, 0) for field in STUCK)
        if value >= self._table.entropy_collapse * start or stuck <= metrics.get("useful_groups", -1):
            return ""
        cause = (
            f"the entropy fell from {start:.3g} to {value:.3g} nats per token, "
            "so completions are nearly alike, and most unsolved groups carry no training signal"
        )
        return f"{cause}; fix: lower [training] lr, or raise [training] temperature"

    def _entropy_explosion(self, metrics: Metrics) -> Verdict:
        if (found := self._since_start(metrics, "entropy")) is None:
            return None
        value, start = found
        # 0 disables the check; a start of 0 would make any entropy an explosion.
        if not 0.0 < self._table.entropy_explosion * start < value:
            return ""
        cause = f"the entropy rose from {start:.3g} to {value:.3g} nats per token: the policy is falling apart"
        return f"{cause}; fix: lower [training] lr and resume from a checkpoint before that"

    def _length_drift(self, metrics: Metrics) -> Verdict:
        if (found := self._since_start(metrics, "length")) is None:
            return None
        value, start = found
        if value >= self._table.length_collapse * start:
            return ""
        cause = f"completions shrank from {start:.1f} to {value:.1f} tokens on average"
        return f"{cause}; fix: check that [reward] type gives nothing for an empty answer, or lower [training] lr"

    def _ratio_drift(self, metrics: Metrics) -> Verdict:
        mean, ess = metrics.get("ratio_mean"), metrics.get("ess_frac")
        if mean is None or ess is None:
            return None
        has_moved = 0.0 < self._table.ratio_drift < abs(mean - 1.0)
        if not has_moved and ess >= self._table.ess_frac:
            return ""
        cause = f"trainer and sampler disagree about the sampled tokens (ratio_mean {mean:.3f}, ess_frac {ess:.2f}"
        largest = f", ratio_max {metrics['ratio_max']:.3g})" if "ratio_max" in metrics else ")"
        return f"{cause}{largest}; fix: set [algorithm] tis_cap = 2.0, or use another [inference] engine"

    def _since_start(self, metrics: Metrics, name: str) -> tuple[float, float] | None:
        """The value at this step and at the start; None without a value, or while the start is being measured."""
        value, values = _measure(metrics, name), self._starts[name]
        return None if value is None or len(values) < self._table.steps else (value, sum(values) / len(values))


def _measure(metrics: Metrics, name: str) -> float | None:
    fields = ("exec_entropy_mean", "exec_surprisal_mean") if name == "entropy" else ("mean_tokens",)
    return next((metrics[field] for field in fields if field in metrics), None)


MEANINGS = {
    "length_shift": "the mean length left its trend within a few steps (gaming_length_shift {:+.2f}, a logarithm)",
    "entropy_shift": "the entropy left its trend within a few steps (gaming_entropy_shift {:+.2f}, a logarithm)",
    "ngram_share": "most rewarded completions share words that others and early ones lack (gaming_ngram_share {:.2f})",
    "answer_shift": "answers come before the reasoning (earlier by {:.0%} of the text)",
    "prompt_answers": "rewarded answers repeat the prompt ({:.0%} more than at the start)",
    "format_credit": "credit goes to the commonest tokens ({:+.0%} against the start)",
}


def build_gaming(context: PluginContext) -> GamingMonitor:
    return GamingMonitor()


class GamingMonitor:
    """Finds `gaming` while the alarm of a shadow is on, otherwise `gaming_suspected`; the fields carry its state."""

    def observe(self, metrics: Mapping[str, Any]) -> list[Finding]:
        found = list[Finding]()
        for prefix in dict.fromkeys(name[: name.index("gaming_")] for name in metrics if "gaming_" in name):
            task = prefix.removeprefix("task_").removesuffix("_")
            own = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
            of = f" of {task}" if task else ""
            if (since := own.get("gaming_since")) is not None:
                details = {
                    "gaming_unconfirmed": "{:.0%} of the rewarded completions now",
                    "gaming_example": "for example {}",
                    "gaming_tokens": "the credit is on {}",
                }
                shown = [text.format(own[name]) for name, text in details.items() if own.get(name) not in (None, "")]
                fix = "fix: read gaming.jsonl, and correct [reward] where it pays for these"
                what = f"since step {since} the shadow confirms fewer of the rewarded completions than before"
                found.append(Finding(state=f"gaming{of}", message=f"{what}: {'; '.join([*shown, fix])}"))
            elif names := own.get("gaming_suspected"):
                found.append(Finding(state=f"gaming_suspected{of}", message=_suspicion(own, str(names).split(", "))))
        return found

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


def _suspicion(metrics: Mapping[str, Any], names: list[str]) -> str:
    signs = [MEANINGS[name].format(metrics[f"gaming_{name}"]) for name in names if f"gaming_{name}" in metrics]
    ngram = f": {metrics['gaming_ngram']!r}" if metrics.get("gaming_ngram") else ""
    fix = f"fix: read some completions in {GENERATIONS}, or set [reward] shadow to a second verifier"
    return f"the reward may be gamed: {'; '.join(signs) or ', '.join(names)}{ngram}; {fix}"
