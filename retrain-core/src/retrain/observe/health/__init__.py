"""Health: reports a run that continues without learning, and why; registers `[health]` and two monitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    factory, traits = "retrain.observe.health.contract:HealthTable", TableTraits(flag_prefix="health_")
    summary = "Warnings about runs that learn nothing."
    register(PluginSpec(name="health", summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_register_health_monitors(register: Callable[[PluginSpec], None]) -> None:
    summary = "Truncation, no useful groups, and drift of entropy, ratios and lengths."
    register(PluginSpec(name="default", summary=summary, factory="retrain.observe.health.monitors:build"))
    summary = "A reward that pays for completions its shadow does not confirm, and signs of it without a shadow."
    register(PluginSpec(name="gaming", summary=summary, factory="retrain.observe.health.monitors:build_gaming"))


@hookimpl
def retrain_watch_run(context: PluginContext) -> object | None:
    from retrain.observe.health.monitors import watch_run  # only a run needs it

    return watch_run(context)
