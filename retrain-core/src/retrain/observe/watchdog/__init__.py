"""The heartbeat of a run, and the deadlines of its phases; registers `[deadlines]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    summary = "Time limits of the phases of a step; 0 = no limit."
    traits = TableTraits(flag_prefix="deadline_")
    factory = "retrain.observe.watchdog.watchdog:DeadlinesTable"
    register(PluginSpec(name="deadlines", summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_watch_run(context: PluginContext) -> object | None:
    from retrain.observe.watchdog.watchdog import watch_run  # only a run needs it

    return watch_run(context)
