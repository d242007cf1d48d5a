"""Registers the commands of this package, and the templates of `retrain init`; names shared by the command line."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

TRAIN = "train"  # the command of a line without one
COMPLETION = "--completion"
VARIABLE = "_RETRAIN_COMPLETE"  # set by the scripts that the shells run on TAB
# Commands of the public package: they keep working, so that its users need not relearn them at once.
PUBLIC_NAMES = {"backends": "plugins --kind backend", "top": "status --follow --active"}
COMMANDS = (
    ("train", "train", "Train with a TOML file (the default command).", "command_line:train"),
    ("train", "audit", "Try the reward on right and wrong texts, or on its failures.", "audit_command:command"),
    ("train", "init", "Write a starting configuration, for your own data too.", "start.command:command"),
    ("train", "explain", "Show the effect of a configuration, without model or data.", "explain:command"),
    ("extend", "plugins", "List every registered name and where it comes from.", "plugins:command"),
    ("extend", "init-plugin", "Generate a plugin: one file or a folder.", "scaffold.init_plugin_command:command"),
    ("tools", "man", "Read the manual: as text, JSON, man page or HTML.", "manual.command:command"),
    ("tools", "migrate-config", "Rewrite a configuration with keys of an earlier version.", "migrate:command"),
)
ALIASES = {"man": ("manual",)}
TEMPLATES = (  # of `retrain init`, those that depend on no particular distribution
    ("default", "100 steps with the documented defaults.", "DEFAULT"),
    ("quickstart", "A short, cheap smoke test of a real model.", "QUICKSTART"),
    ("experiment", "A seeded 500-step run with held-out evaluation.", "EXPERIMENT"),
)
# Keys of [backend] in earlier versions that `migrate-config` moves to [backend.options].
OPTIONS = ("transport", "zmq_host", "zmq_port", "zmq_hwm", "strict_advantages", "sync_wait_s", "sync_poll_s")
LEGACY_KEYS = {f"prime_rl_{option}": option for option in OPTIONS}


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    for group, name, summary, place in COMMANDS:
        aliases, factory = ALIASES.get(name, ()), f"retrain.cli.{place}"
        register(PluginSpec(name=name, summary=summary, factory=factory, aliases=aliases, traits=group))


@hookimpl
def retrain_register_init_templates(register: Callable[[PluginSpec], None]) -> None:
    for name, summary, text in TEMPLATES:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.cli.start.templates:{text}"))


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The keys of [backend] that `migrate-config` rewrites."""
    traits = TableTraits(extends=True, legacy_keys={old: f"options.{new}" for old, new in LEGACY_KEYS.items()})
    register(PluginSpec(name="backend", summary="Its keys of earlier versions.", factory=None, traits=traits))
