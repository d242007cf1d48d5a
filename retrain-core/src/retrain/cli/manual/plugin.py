"""Registers `man` (also called `manual`) and `schema`."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """The commands that document the installation."""
    register(
        PluginSpec(
            name="man",
            summary="Read the manual: as text, JSON, man page or HTML.",
            factory="retrain.cli.manual.command:command",
            aliases=("manual",),
        )
    )
    register(
        PluginSpec(
            name="schema",
            summary="Write the JSON Schema of the configuration, for editors.",
            factory="retrain.cli.manual.schema_command:command",
        )
    )
