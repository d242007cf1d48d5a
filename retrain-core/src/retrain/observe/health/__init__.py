"""Health: detects from its metrics a run that continues without learning, and says why.

Registers `[health]` and the monitors `default` and `gaming`.
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
    """The table of monitors, policy and thresholds."""
    traits = TableTraits(flag_prefix="health_")
    factory = "retrain.observe.health.contract:HealthTable"
    register(
        PluginSpec(name="health", summary="Warnings about runs that learn nothing.", factory=factory, traits=traits)
    )


@hookimpl
def retrain_register_health_monitors(register: Callable[[PluginSpec], None]) -> None:
    """The built-in monitors."""
    summary = "Truncation, no useful groups, and drift of entropy, ratios and lengths."
    register(PluginSpec(name="default", summary=summary, factory="retrain.observe.health.monitors:build"))
    summary = "A reward that pays for what its shadow does not confirm, and what looks like it without one."
    register(PluginSpec(name="gaming", summary=summary, factory="retrain.observe.health.monitors:build_gaming"))


@hookimpl
def retrain_watch_run(context: PluginContext) -> object | None:
    """The monitors of a run."""
    from retrain.observe.health.watch import watch_run  # only a run needs it

    return watch_run(context)
