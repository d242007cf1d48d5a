"""Generates a new plugin: a single file, or a distribution.

Registers the command that generates a plugin.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain init-plugin`."""
    summary = "Generate a plugin as one file in this folder, or as a distribution."
    factory = "retrain.cli.scaffold.init_plugin_command:command"
    register(PluginSpec(name="init-plugin", summary=summary, factory=factory, traits="extend"))
