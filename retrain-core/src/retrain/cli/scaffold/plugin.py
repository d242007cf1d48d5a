"""Registers the commands that generate a plugin."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`plugin new` for a distribution, `init-plugin` for a single file."""
    summary = "Generate a plugin as a distribution: plugin new NAME --kind KIND."
    register(
        PluginSpec(
            name="plugin", summary=summary, factory="retrain.cli.scaffold.plugin_command:command", traits="extend"
        )
    )
    summary = "Generate a plugin as one file in this folder: --kind KIND --name NAME."
    register(
        PluginSpec(
            name="init-plugin",
            summary=summary,
            factory="retrain.cli.scaffold.init_plugin_command:command",
            traits="extend",
        )
    )
