"""Registers `retrain capacity`, and measures every run from start to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.capacity.meter import Meter
from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec

if TYPE_CHECKING:
    from retrain.views import GroupsView, RunView

METERS: dict[Path, Meter] = {}  # by run folder; a run that is over leaves when the next one starts


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """One command."""
    summary = "Say how much memory and time a configuration needs, and what to change if that is too much."
    register(PluginSpec(name="capacity", summary=summary, factory="retrain.capacity.command:command"))


@hookimpl
def retrain_run_start(run: RunView) -> None:
    """Begin to measure."""
    for folder in [folder for folder, meter in METERS.items() if meter.is_over]:
        del METERS[folder]
    METERS[run.folder] = Meter()


@hookimpl
def retrain_phase(run: RunView, step: int, phase: str) -> None:
    """Charge the phase before with its peak."""
    METERS[run.folder].enter(phase)


@hookimpl
def retrain_groups_scored(run: RunView, groups: GroupsView) -> None:
    """How long prompts and completions are."""
    for group in groups.groups:
        for completion in group.completions:
            actions = completion.num_actions
            METERS[run.folder].saw(len(completion.tokens_T) - actions, actions)


@hookimpl
def retrain_step_end(run: RunView, metrics: Mapping[str, Any]) -> None:
    """How long the step took; the evaluation before training has no such time."""
    if "step_time_s" in metrics:
        METERS[run.folder].step(float(metrics["step_time_s"]))


@hookimpl
def retrain_run_end(run: RunView, error: BaseException | None) -> None:
    """Nothing more is charged to a phase of the run."""
    METERS[run.folder].end()
