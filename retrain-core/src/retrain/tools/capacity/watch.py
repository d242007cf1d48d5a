"""Measures a run from start to end, beside the forecast made before it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.contracts.watcher import Watcher
from retrain.kernel.hooks import hookimpl
from retrain.tools.capacity.meter import PHASES, Meter

if TYPE_CHECKING:
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
        if self._meter.steps >= FEWEST_STEPS:
            from retrain.tools.capacity.advice import hint

            if text := hint(self._meter.shares, run.config):
                LOG.info("Time: %s.", text)

    def describe_run(self, run: RunView) -> Mapping[str, Any]:
        """The forecast, made before the first step, and the measurements once the run is over."""
        from retrain.tools.capacity.section import predicted, time_lines
        from retrain.tools.capacity.workload import eval_completions_of

        if not self._predicted:
            line, warning = time_lines(run.config, max(run.first_step, 0))
            if line:
                LOG.info("%s", line)
            if warning:
                LOG.warning("%s.", warning[0].upper() + warning[1:])
            self._predicted = predicted(run.config, self._plugins)
        measured = {"measured": self._meter.measured(eval_completions_of(run.config))} if self._meter.is_over else {}
        return {"capacity": {"predicted": self._predicted} | measured}
