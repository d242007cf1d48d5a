"""Registers the core commands."""

from __future__ import annotations

from collections.abc import Callable

from retrain.cli.legacy import MOVED
from retrain.kernel.declared import TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec

COMMANDS = (
    ("train", "Train with a TOML file (the default command).", "retrain.cli.train:command"),
    (
        "completion",
        "Print the completion script for your shell.",
        "retrain.cli.completion:command",
    ),
    (
        "audit",
        "Try the configured reward on right and wrong texts, without a model.",
        "retrain.cli.audit_command:command",
    ),
    ("explain", "Show what a configuration would do, without model or data.", "retrain.cli.explain:command"),
    (
        "plugins",
        "List every registered name and where it comes from.",
        "retrain.cli.plugins:command",
    ),
    (
        "backends",
        "Show each backend's capabilities, options and dependencies.",
        "retrain.cli.backends:command",
    ),
    (
        "migrate-config",
        "Rewrite a configuration that uses keys of an earlier version.",
        "retrain.cli.migrate:command",
    ),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """The core commands."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=factory))


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The keys of [backend] that `migrate-config` rewrites."""
    traits = TableTraits(extends=True, legacy_keys=MOVED)
    register(PluginSpec(name="backend", summary="Its keys of earlier versions.", factory=None, traits=traits))
