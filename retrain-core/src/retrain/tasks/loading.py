"""Loads the tasks of a run, one or several."""

from __future__ import annotations

from retrain.kernel.contracts.context import PluginContext
from retrain.tasks.tasks import Tasks, load_task


def load_tasks(context: PluginContext) -> Tasks:
    """Load every prompt of the run, and its verifier while it starts up."""
    context.config.refuse_lost("data", "reward", "environment")
    if not context.config.data.tasks:
        return load_task(context)
    from retrain.tasks.several import load_several  # most runs have one task

    return load_several(context)
