"""How much memory and time a configuration needs, and how much its runs used. See `docs/pages/capacity.md`.

Registers `retrain capacity`, and measures every run from start to end.
"""

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
    """`retrain capacity`."""
    summary = "Estimate the memory and time of a configuration, and say what to change if it does not fit."
    register(
        PluginSpec(name="capacity", summary=summary, factory="retrain.tools.capacity.command:command", traits="train")
    )


@hookimpl
def retrain_watch_run(context: PluginContext) -> object:
    """The measurements of a run."""
    from retrain.tools.capacity.watch import CapacityWatch  # only a run needs it

    return CapacityWatch(context.plugins)


@hookimpl
def retrain_explain(config: Config, plugins: Plugins) -> Mapping[str, Any]:
    """Peak memory, biggest tensor, and the time if a past run gives it."""
    from retrain.tools.capacity.show import explained

    return explained(config, plugins)
