"""Runs that anybody can repeat: one file with all that a run or campaign was made of, and its rerun.

Registers `pack` and `rerun`.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

COMMANDS = (
    ("pack", "Write one file with all that a run or a campaign was made of, for others to rerun."),
    ("rerun", "Run a pack again, and compare with what it recorded line by line."),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """One command makes a pack, the other repeats it."""
    for name, summary in COMMANDS:
        register(
            PluginSpec(name=name, summary=summary, factory=f"retrain.tools.pack.{name}_command:command", traits="tools")
        )
