"""The manual and the JSON Schema of the configuration, generated from the specs of everything installed.

Registers `man` (also called `manual`).
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain man`."""
    register(
        PluginSpec(
            name="man",
            summary="Read the manual: as text, JSON, man page or HTML.",
            factory="retrain.cli.manual.command:command",
            aliases=("manual",),
            traits="tools",
        )
    )
