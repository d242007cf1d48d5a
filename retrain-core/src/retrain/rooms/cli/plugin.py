"""Registers the commands and the templates that come with the kernel."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec
from retrain.rooms.cli.legacy import MOVED

COMMANDS = (
    ("train", "Train as a TOML file says (the default command).", "retrain.rooms.cli.train:command"),
    ("init", "Write a starting configuration.", "retrain.rooms.cli.init:command"),
    (
        "completion",
        "Print the script that completes our command line in your shell.",
        "retrain.rooms.cli.completion:command",
    ),
    ("explain", "Show what a configuration would do, without model or data.", "retrain.rooms.cli.explain:command"),
    (
        "plugins",
        "List everything that is plugged in, and where each part comes from.",
        "retrain.rooms.cli.plugins:command",
    ),
    (
        "backends",
        "What each backend can do, its options, and what it needs installed.",
        "retrain.rooms.cli.backends:command",
    ),
    (
        "migrate-config",
        "Rewrite a configuration that has keys of an earlier version.",
        "retrain.rooms.cli.migrate:command",
    ),
)
TEMPLATES = (
    ("default", "100 steps with the documented defaults.", "retrain.rooms.cli.templates:DEFAULT"),
    ("quickstart", "A short, cheap smoke test of a real model.", "retrain.rooms.cli.templates:QUICKSTART"),
    ("experiment", "A seeded 500-step run with held-out evaluation.", "retrain.rooms.cli.templates:EXPERIMENT"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """The commands of the kernel."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=factory))


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The keys of [backend] that `migrate-config` rewrites."""
    traits = TableTraits(extends=True, legacy_keys=MOVED)
    register(PluginSpec(name="backend", summary="Its keys of earlier versions.", factory=None, traits=traits))


@hookimpl
def retrain_register_init_templates(register: Callable[[PluginSpec], None]) -> None:
    """The templates that need no particular distribution."""
    for name, summary, factory in TEMPLATES:
        register(PluginSpec(name=name, summary=summary, factory=factory))
