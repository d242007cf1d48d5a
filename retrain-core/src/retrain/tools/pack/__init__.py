"""Runs that others can repeat: one file with everything that a run or campaign was made of, and its rerun."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

COMMANDS = {
    "pack": "Write one file with everything that a run or a campaign was made of, for others to rerun.",
    "rerun": "Run a pack again, and compare with its records line by line.",
}


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    for name, summary in COMMANDS.items():
        factory = f"retrain.tools.pack.{name}_command:command"
        register(PluginSpec(name=name, summary=summary, factory=factory, traits="tools"))
