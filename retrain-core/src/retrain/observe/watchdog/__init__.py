"""The heartbeat of a run, and the deadlines of its phases.

Registers `[deadlines]`, and a watchdog for every run: its heartbeat and the deadlines of its phases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The table of deadlines."""
    summary = "How long each phase may take; 0 = no limit."
    traits = TableTraits(flag_prefix="deadline_")
    factory = "retrain.observe.watchdog.watchdog:DeadlinesTable"
    register(PluginSpec(name="deadlines", summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_watch_run(context: PluginContext) -> object | None:
    """The watchdog of a run."""
    from retrain.observe.watchdog.watchdog import watch_run  # only a run needs it

    return watch_run(context)
