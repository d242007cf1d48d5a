"""Registers the commands of this room."""

from __future__ import annotations

from collections.abc import Callable

from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`trace` and `credit`."""
    for name, summary in (
        ("trace", "Try the configured flow of credit on synthetic data, without a model."),
        ("credit", "Show, token by token, the credit of a run's completions, as it was or under another flow."),
    ):
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.insight.{name}_command:command"))
