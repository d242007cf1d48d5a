"""Registers the commands that start a plugin."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """A distribution, and a single file."""
    summary = "Start a plugin as a distribution of its own: plugin new NAME --kind KIND."
    register(PluginSpec(name="plugin", summary=summary, factory="retrain.rooms.scaffold.plugin_command:command"))
    summary = "Start a plugin as one file of this folder: --kind KIND --name NAME."
    register(
        PluginSpec(name="init-plugin", summary=summary, factory="retrain.rooms.scaffold.init_plugin_command:command")
    )
