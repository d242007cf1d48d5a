"""The first command of a project: `retrain init` writes a configuration, from a template or for data of your own.

Registers the command `init` and the templates that depend on no particular distribution.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec

TEMPLATES = (
    ("default", "100 steps with the documented defaults.", "DEFAULT"),
    ("quickstart", "A short, cheap smoke test of a real model.", "QUICKSTART"),
    ("experiment", "A seeded 500-step run with held-out evaluation.", "EXPERIMENT"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain init`."""
    summary = "Write a starting configuration, for your own data too."
    register(PluginSpec(name="init", summary=summary, factory="retrain.cli.start.command:command", traits="train"))


@hookimpl
def retrain_register_init_templates(register: Callable[[PluginSpec], None]) -> None:
    """The templates that depend on no particular distribution."""
    for name, summary, text in TEMPLATES:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.cli.start.templates:{text}"))
