"""Measures a run from start to end: peak memory by phase, and the median time of a step."""

from __future__ import annotations

import logging
import resource
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.config.plugin_tables import SetsKeys
from retrain.kernel.contracts.views import Watcher
from retrain.kernel.errors import RetrainError
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.views import GroupsView, RunView
    from retrain.kernel.registry import Plugins

FEWEST_STEPS = 5  # needed for a hint about time
RECENT_STEPS = 500  # bounds the list of which the median is taken
PHASES = ("sample", "score", "train")  # phases with a `*_time_s` metric
LOG = logging.getLogger("retrain")


class CapacityWatch(Watcher):
    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._meter = Meter()
        self._predicted: dict[str, Any] | None = None

    @hookimpl
    def retrain_run_start(self) -> None:
        self._meter.restart()

    def phase(self, step: int, phase: str) -> None:
        self._meter.enter(phase)

    @hookimpl
    def retrain_groups_scored(self, groups: GroupsView) -> None:
        for completion in (completion for group in groups.groups for completion in group.completions):
            self._meter.saw(len(completion.tokens_T) - completion.num_actions, completion.num_actions)

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        if "step_time_s" in metrics:  # absent for the evaluation before training
            phases_s = {phase: float(metrics.get(f"{phase}_time_s", 0.0)) for phase in PHASES}
            self._meter.step(float(metrics["step_time_s"]), phases_s)
        if "eval_time_s" in metrics:
            self._meter.evaluations_s.append(float(metrics["eval_time_s"]))

    @hookimpl
    def retrain_run_end(self, run: RunView) -> None:
        self._meter.is_over = True
        if self._meter.num_steps >= FEWEST_STEPS:
            from retrain.tools.capacity.advice import hint

            if text := hint(self._meter.shares, run.config):
                LOG.info("Time: %s.", text)

    def describe_run(self, run: RunView) -> Mapping[str, Any]:
        if self._predicted is None:
            self._predicted = self._predict(run.config, max(run.first_step, 0))
        found = {"measured": self._meter.measured(run.config)} if self._meter.is_over else {}
        return {"capacity": ({"predicted": self._predicted} if self._predicted else {}) | found}

    def _predict(self, config: Config, steps_done: int) -> dict[str, Any]:
        """Log the time of a run with evaluations; return the forecast of a GPU's memory, or why it failed."""
        has_gpu = "gpu" in config.backend.devices
        if not (has_gpu or config.eval.examples or config.table("eval", SetsKeys).sets):
            return {}
        from retrain.tools.capacity.forecast import forecast, past_runs, run_time  # most of this package

        past = past_runs(config)
        time = run_time(config, past, steps_done=steps_done)
        if rows := time.rows():
            LOG.info("Time: training about %s, evaluation about %s.", rows["training_time"], rows["evaluation_time"])
        # A resumed run cannot change the keys of its evaluations.
        if time.warning and not steps_done:
            LOG.warning("%s.", time.warning[0].upper() + time.warning[1:])
        if not has_gpu:
            return {}
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


def peak_bytes() -> int:
    """Return the peak of this process's resident memory so far."""
    # /proc first, since on Linux a new process inherits the `ru_maxrss` of its parent.
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kibibytes on other systems


def resident_bytes() -> int:
    """Return the current resident memory, or the peak if the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return peak_bytes()


class Meter:
    """Follows one session of a run from phase to phase.

    The peak of a process only rises and is never reset, since other tools read it too: a phase that raises it is
    charged with the new peak, and a phase that never does is absent.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.restart()

    def restart(self) -> None:
        self._phase = "start"
        self._peaks: dict[str, int] = {}
        self._resident = resident_bytes()
        self._last = self.num_steps = 0
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self.evaluations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._totals_s: dict[str, float] = defaultdict(float)
        self._longest = {"prompt": 0, "completion": 0}

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of the steps' time in `sample`, `score` (waiting) and `train`; empty before a step."""
        whole_s = self._totals_s["step"]
        return {phase: self._totals_s[phase] / whole_s for phase in PHASES} if whole_s else {}

    def enter(self, phase: str) -> None:
        if (peak := peak_bytes()) > self._last:
            self._peaks[self._phase] = self._last = peak
        self._phase = phase

    def saw(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._longest["prompt"] = max(self._longest["prompt"], prompt_tokens)
        self._longest["completion"] = max(self._longest["completion"], completion_tokens)

    def step(self, seconds: float, phases_s: Mapping[str, float] | None = None) -> None:
        # The first step compiles and warms caches, so it is left out as soon as there is another.
        if len(self._times) == 1:
            self._totals_s.clear()
        self._times.append(seconds)
        self.num_steps += 1
        for name, taken_s in {"step": seconds, **(phases_s or {})}.items():
            self._totals_s[name] += taken_s

    def measured(self, config: Config | None = None) -> dict[str, Any]:
        """Return bytes, seconds and tokens; times and lengths are absent before the first step."""
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
            if self.evaluations_s and config:
                from retrain.tools.capacity.workload import eval_completions_of  # only where there were evaluations

                if completions := eval_completions_of(config):
                    found["eval_completion_time_s"] = statistics.median(self.evaluations_s) / completions
            found |= {f"longest_{name}_tokens": tokens for name, tokens in self._longest.items() if tokens}
        return found
