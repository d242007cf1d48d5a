"""Generated section `annotated`: one configuration file with every key of a run at its default, and what it means."""

from __future__ import annotations

from typing import Any

import tomli_w

from retrain.kernel.config.keys import Key, keys_of
from retrain.kernel.plugins.check import registered_tables
from retrain.kernel.plugins.manager import Plugins

COMMENT_FROM = 40  # column
TEXT_LIMIT = 40  # characters of a default beyond which its comment stands above it


def annotated(plugins: Plugins) -> str:
    """A TOML block that loads, changes nothing, and names every key but those that tell how runs are started."""
    tables = []
    for name, entry in registered_tables(plugins).items():
        if not entry.traits.starts_runs and not entry.traits.pending:
            keys = keys_of(name, entry.model, entry.traits)
            tables.append("\n".join([f"[{name}]", *(_line(key) for key in keys)]))
    return "```toml\n" + "\n\n".join(tables) + "\n```"


def _line(key: Key) -> str:
    comment = f"# {key.description}" + (f" Not yet: {key.pending}." if key.pending else "")
    if key.default is None:
        return f"# {key.name} =   {comment}"
    setting = f"{key.name} = {_value(key.default)}"
    return f"{comment}\n{setting}" if len(setting) > TEXT_LIMIT else f"{setting:<{COMMENT_FROM}}  {comment}"


def _value(content: Any) -> str:
    """As TOML writes it on one line."""
    if isinstance(content, dict):
        return "{" + ", ".join(f"{name} = {_value(inner)}" for name, inner in content.items()) + "}"
    if isinstance(content, list):
        return "[" + ", ".join(map(_value, content)) + "]"
    return tomli_w.dumps({"x": content}).removeprefix("x = ").rstrip()
