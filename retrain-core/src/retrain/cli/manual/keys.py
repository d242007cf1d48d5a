"""Generated sections `keys`, `flags` and `annotated`: every key of every installed table."""

from __future__ import annotations

from typing import Any

import tomli_w

from retrain.cli.manual import markdown
from retrain.cli.manual.json_schema import key_schemas
from retrain.kernel.config.keys import Key, keys_of
from retrain.kernel.registry import Plugins
from retrain.run.check import registered_tables

RANGES = (("minimum", "≥ "), ("exclusiveMinimum", "> "), ("maximum", "≤ "), ("exclusiveMaximum", "< "))
COMMENT_FROM = 40  # column
TEXT_LIMIT = 40  # a longer default has its comment on the line above
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "table"}


def keys(plugins: Plugins, *only: str) -> str:
    """Every key, table by table: type and range, default, flag, meaning; of all tables, or `only` of these."""
    lines = []
    for name, entry in registered_tables(plugins).items():
        if only and name not in only:
            continue
        schemas = key_schemas(entry)
        rows = [
            (
                markdown.code(key.name),
                _type(schemas[key.name]),
                _default(key),
                markdown.code(f"--{key.flag}"),
                _text(key),
            )
            for key in keys_of(name, entry.model, entry.traits)
        ]
        purpose = markdown.prose(entry.model.__doc__).split("\n\n")[0]
        lines += [f"### [{name}]", purpose, markdown.table(("key", "type", "default", "flag", "meaning"), rows)]
    return "\n\n".join(lines)


def flags(plugins: Plugins) -> str:
    """Every flag and the key that it sets, sorted by flag."""
    found = [
        key for name, entry in registered_tables(plugins).items() for key in keys_of(name, entry.model, entry.traits)
    ]
    rows = [
        (markdown.code(f"--{key.flag}"), markdown.code(f"[{key.table}] {key.name}"))
        for key in sorted(found, key=lambda key: key.flag)
    ]
    return markdown.table(("flag", "key"), rows)


def _default(key: Key) -> str:
    if isinstance(key.default, list) and any(isinstance(value, dict) for value in key.default):
        return f"{len(key.default)} tables"  # too long for a cell; `retrain explain --keys --json` shows them
    return markdown.value(key.default)


def _text(key: Key) -> str:
    """The meaning, with aliases and what is not built yet."""
    also = f" Also called {', '.join(map(markdown.code, key.aliases))}." if key.aliases else ""
    return key.description + also + (f" **Not yet:** {key.pending}." if key.pending else "")


def _type(schema: dict[str, Any]) -> str:
    """`integer ≥ 1`, `"a" | "b"`, `list of text`."""
    if "enum" in schema:
        return " | ".join(markdown.value(choice) for choice in schema["enum"])
    if "const" in schema:
        return markdown.value(schema["const"])
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'values'}"
    limits = [f"{sign}{schema[word]:g}" for word, sign in RANGES if word in schema]
    return " ".join([WORDS.get(schema.get("type", ""), "any"), ", ".join(limits)]).strip()


def annotated(plugins: Plugins) -> str:
    """A TOML block with every key of a run at its default; loading it changes nothing."""
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
    setting = f"{key.name} = {_toml_value(key.default)}"
    return f"{comment}\n{setting}" if len(setting) > TEXT_LIMIT else f"{setting:<{COMMENT_FROM}}  {comment}"


def _toml_value(content: Any) -> str:
    """The value as TOML on one line."""
    if isinstance(content, dict):
        return "{" + ", ".join(f"{name} = {_toml_value(inner)}" for name, inner in content.items()) + "}"
    if isinstance(content, list):
        return "[" + ", ".join(map(_toml_value, content)) + "]"
    return tomli_w.dumps({"x": content}).removeprefix("x = ").rstrip()
