"""`retrain capacity`: the memory and time that a configuration needs, and those that its runs used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.registry import Plugins


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    summary = "Estimate the memory and time of a configuration, and the key to change if it does not fit."
    factory = "retrain.tools.capacity.command:command"
    register(PluginSpec(name="capacity", summary=summary, factory=factory, traits="train"))


@hookimpl
def retrain_watch_run(context: PluginContext) -> object:
    from retrain.tools.capacity.watch import CapacityWatch  # only a run needs it

    return CapacityWatch(context.plugins)


@hookimpl
def retrain_explain(config: Config, plugins: Plugins) -> Mapping[str, Any]:
    from retrain.tools.capacity.show import explained

    return explained(config, plugins)
