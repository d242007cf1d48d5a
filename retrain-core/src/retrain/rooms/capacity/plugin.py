"""Registers `retrain capacity`, and measures every run from start to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec
from retrain.rooms.capacity.meter import PHASES, Meter

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.views import GroupsView, RunView
    from retrain.kernel.plugins.manager import Plugins

FEWEST_STEPS = 5  # needed for a hint about time
LOG = logging.getLogger("retrain")
RUNS: list[tuple[RunView, Meter]] = []  # of this process; finished ones are dropped when the next one starts


def meter_of(run: RunView) -> Meter | None:
    """The meter of a run, None if it has none."""
    return next((meter for known, meter in RUNS if known is run), None)


def _begun(run: RunView) -> Meter:
    """The meter of a run, created if it has none."""
    meter = meter_of(run)
    if meter is None:
        meter = Meter()
        RUNS[:] = [(known, other) for known, other in RUNS if not other.is_over]
        RUNS.append((run, meter))
    return meter


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain capacity`."""
    summary = "Estimate the memory and time of a configuration, and say what to change if it does not fit."
    register(PluginSpec(name="capacity", summary=summary, factory="retrain.rooms.capacity.command:command"))


@hookimpl
def retrain_run_start(run: RunView) -> None:
    """Start to measure."""
    _begun(run).restart()


@hookimpl
def retrain_phase(run: RunView, step: int, phase: str) -> None:
    """Charge the previous phase with its peak."""
    if meter := meter_of(run):
        meter.enter(phase)


@hookimpl
def retrain_groups_scored(run: RunView, groups: GroupsView) -> None:
    """Record the lengths of prompts and completions."""
    if meter := meter_of(run):
        for completion in (completion for group in groups.groups for completion in group.completions):
            actions = completion.num_actions
            meter.saw(len(completion.tokens_T) - actions, actions)


@hookimpl
def retrain_step_end(run: RunView, metrics: Mapping[str, Any]) -> None:
    """Record the time of the step; the evaluation before training has none."""
    meter = meter_of(run)
    if meter and "step_time_s" in metrics:
        phases_s = {phase: float(metrics.get(f"{phase}_time_s", 0.0)) for phase in PHASES}
        meter.step(float(metrics["step_time_s"]), phases_s)


@hookimpl
def retrain_run_end(run: RunView, error: BaseException | None) -> None:
    """Stop measuring; if one phase took most of the time, log what to try."""
    if meter := meter_of(run):
        meter.end()
        if meter.steps >= FEWEST_STEPS:
            from retrain.rooms.capacity.advice import hint

            if text := hint(meter.shares, run.config):
                LOG.info("Time: %s.", text)


@hookimpl
def retrain_explain(config: Config, plugins: Plugins) -> Mapping[str, Any]:
    """Peak memory, biggest tensor, and the time if a past run gives it."""
    from retrain.rooms.capacity.section import explained

    return explained(config, plugins)


@hookimpl
def retrain_describe_run(run: RunView, plugins: Plugins) -> Mapping[str, Any]:
    """The forecast, made before the first step, and the measurements once the run is over."""
    from retrain.rooms.capacity.section import predicted

    meter = _begun(run)
    if not meter.predicted:
        meter.predicted = predicted(run.config, plugins)
    entry: dict[str, Any] = {"predicted": meter.predicted}
    return {"capacity": entry | ({"measured": meter.measured()} if meter.is_over else {})}
