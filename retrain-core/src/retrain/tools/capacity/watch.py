"""Measures a run from start to end, beside the forecast made before it."""

from __future__ import annotations

import logging
import resource
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.contracts.views import Watcher
from retrain.kernel.errors import RetrainError
from retrain.kernel.hooks import hookimpl
from retrain.tools.capacity.forecast import forecast, past_runs, run_time
from retrain.tools.capacity.workload import eval_completions_of

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.views import GroupsView, RunView
    from retrain.kernel.registry import Plugins

FEWEST_STEPS = 5  # needed for a hint about time
LOG = logging.getLogger("retrain")


class CapacityWatch(Watcher):
    """The meter of one run, and what `run.json` says about it."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._meter = Meter()
        self._predicted: dict[str, Any] = {}

    @hookimpl
    def retrain_run_start(self) -> None:
        """Start to measure."""
        self._meter.restart()

    def phase(self, step: int, phase: str) -> None:
        """Charge the previous phase with its peak."""
        self._meter.enter(phase)

    @hookimpl
    def retrain_groups_scored(self, groups: GroupsView) -> None:
        """Record the lengths of prompts and completions."""
        for completion in (completion for group in groups.groups for completion in group.completions):
            actions = completion.num_actions
            self._meter.saw(len(completion.tokens_T) - actions, actions)

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        """Record the time of the step; the evaluation before training has none."""
        if "step_time_s" in metrics:
            phases_s = {phase: float(metrics.get(f"{phase}_time_s", 0.0)) for phase in PHASES}
            self._meter.step(float(metrics["step_time_s"]), phases_s)
        if "eval_time_s" in metrics:
            self._meter.evaluated(float(metrics["eval_time_s"]))

    @hookimpl
    def retrain_run_end(self, run: RunView) -> None:
        """Stop measuring; if one phase took most of the time, log what to try."""
        self._meter.end()
        if self._meter.num_steps >= FEWEST_STEPS:
            from retrain.tools.capacity.advice import hint

            if text := hint(self._meter.shares, run.config):
                LOG.info("Time: %s.", text)

    def describe_run(self, run: RunView) -> Mapping[str, Any]:
        """The forecast, made before the first step, and the measurements once the run is over."""
        self._predicted = self._predicted or self._predict(run.config, max(run.first_step, 0))
        measured = {"measured": self._meter.measured(eval_completions_of(run.config))} if self._meter.is_over else {}
        return {"capacity": {"predicted": self._predicted} | measured}

    def _predict(self, config: Config, steps_done: int) -> dict[str, Any]:
        """Log the time that is expected; return the forecast of memory, or why there is none."""
        past = past_runs(config)
        time = run_time(config, past, steps_done=steps_done)
        if rows := time.rows():
            LOG.info("Time: training about %s, evaluation about %s.", rows["training_time"], rows["evaluation_time"])
        if time.warning and not steps_done:  # a resumed run cannot change the keys of its evaluations
            LOG.warning("%s.", time.warning[0].upper() + time.warning[1:])
        try:
            found = forecast(config, self._plugins, past=past)
        except RetrainError as error:
            return {"unknown": error.problems[0].what}
        return {
            "peak_memory_bytes": found.estimate.peak_bytes,
            "peak_phase": found.estimate.worst.name,
            "prompt_tokens": found.work.prompt_tokens,
            "prompt_tokens_are_assumed": found.is_prompt_assumed,
            "median_step_time_s": past.median_step_time_s,
            "peak_memory_bytes_by_phase": {phase.name: phase.peak_bytes for phase in found.estimate.phases},
        }


# Measures a run: peak memory by phase, and the median time of a step.


RECENT_STEPS = 500  # bounds the list of which the median is taken
START = "start"
PHASES = ("sample", "score", "train")  # phases with a `*_time_s` metric
_PAGE_BYTES = resource.getpagesize()
_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """The peak of this process's resident memory so far.

    On Linux, from /proc: `ru_maxrss` there inherits the peak of the parent process.
    """
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kibibytes elsewhere


def resident_bytes() -> int:
    """Current resident memory, or the peak if the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return peak_bytes()


class Meter:
    """Follows one session of a run from phase to phase.

    The peak of a process only rises and is never reset, so that other tools see it too: a phase that raises it is
    charged with the new peak, and a phase that never does is absent.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.restart()

    def restart(self) -> None:
        """Start to measure: the model is loaded, and the first step comes next."""
        self._phase = START
        self._peaks: dict[str, int] = {}
        self._resident = resident_bytes()
        self._last = self.num_steps = 0
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._evaluations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._totals_s: dict[str, float] = defaultdict(float)
        self._longest = {"prompt": 0, "completion": 0}

    @property
    def shares(self) -> dict[str, float]:
        """Share of the steps' time in `sample`, `score` (waiting for it) and `train`; empty before the first step."""
        whole_s = self._totals_s["step"]
        return {phase: self._totals_s[phase] / whole_s for phase in PHASES} if whole_s > 0.0 else {}

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        peak = peak_bytes()
        if peak > self._last:
            self._peaks[self._phase] = self._last = peak
        self._phase = phase

    def saw(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Record the lengths of a sampled row."""
        longest = self._longest
        longest["prompt"] = max(longest["prompt"], prompt_tokens)
        longest["completion"] = max(longest["completion"], completion_tokens)

    def step(self, seconds: float, phases_s: Mapping[str, float] | None = None) -> None:
        """Record a finished step and the seconds that it spent in each phase."""
        if len(self._times) == 1:  # the first step compiles and warms caches: left out if there are others
            self._totals_s.clear()
        self._times.append(seconds)
        self.num_steps += 1
        for name, taken_s in {"step": seconds, **(phases_s or {})}.items():
            self._totals_s[name] += taken_s

    def evaluated(self, seconds: float) -> None:
        """Record a finished evaluation."""
        self._evaluations_s.append(seconds)

    def measured(self, eval_completions: int = 0) -> dict[str, Any]:
        """Bytes, seconds, tokens, as JSON; times and lengths are absent before the first step.

        `eval_completions` are those of one evaluation.
        """
        self.enter(self._phase)
        found: dict[str, Any] = {
            "peak_memory_bytes": self._last,
            "peak_memory_bytes_by_phase": dict(self._peaks),
            "memory_at_start_bytes": self._resident,
        }
        if self._times:
            warm = list(self._times)[1:] or list(self._times)
            found |= {"median_step_time_s": statistics.median(warm), "steps": len(self._times)}
            found |= {"time_shares": self.shares} if any(self.shares.values()) else {}
            if self._evaluations_s and eval_completions:
                found["eval_completion_time_s"] = statistics.median(self._evaluations_s) / eval_completions
            found |= {f"longest_{name}_tokens": tokens for name, tokens in self._longest.items() if tokens}
        return found

    def end(self) -> None:
        """End the measurement."""
        self.enter(self._phase)
        self.is_over = True
