"""Registers the command `audit`, and audits the verifier of every run before its model loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.rooms.tasks.contracts import LoadedTasks


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain audit`."""
    summary = "Try the configured reward on right and wrong texts, without a model."
    register(PluginSpec(name="audit", summary=summary, factory="retrain.rooms.audit.command:command"))


@hookimpl
def retrain_tasks_loaded(context: PluginContext, tasks: LoadedTasks) -> None:
    """Refuse a run whose verifier fails the audit."""
    from retrain.rooms.audit.start import refuse_unfit_verifier

    refuse_unfit_verifier(context, tasks)
