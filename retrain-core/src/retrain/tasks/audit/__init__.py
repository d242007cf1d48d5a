"""The plugin that audits the verifier of every run before its model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.tasks import LoadedTasks


@hookimpl
def retrain_tasks_loaded(context: PluginContext, tasks: LoadedTasks) -> None:
    from retrain.tasks.audit.verifier_audit import refuse_unfit_verifier

    refuse_unfit_verifier(context, tasks)
