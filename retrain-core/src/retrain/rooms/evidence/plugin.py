"""Registers what this room adds to a run and to the command line."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec

COMMANDS: tuple[tuple[str, str, str], ...] = ()


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands about the ledger."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.rooms.evidence.{factory}"))
