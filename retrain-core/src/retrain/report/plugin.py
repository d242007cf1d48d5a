"""Registers the commands that write or serve pages."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec

COMMANDS = (
    ("look", "watch", "Serve a page that follows a run while it goes on: RUN.", "watch.command:command"),
    ("compare", "report", "Write one offline page about a campaign or a set of runs.", "command:command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands that write or serve pages."""
    for group, name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.report.{factory}", traits=group))
