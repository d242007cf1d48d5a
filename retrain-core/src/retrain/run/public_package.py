"""Names of the public `retrain` package, and their replacements here; the table is `public_package.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from retrain.kernel.config.keys import Key
from retrain.kernel.declared import Kind
from retrain.kernel.errors import Problem
from retrain.kernel.registry import Plugins

# The beginning of the note on a name, by the status of its row
PREFIXES: Mapping[str, str] = {
    "renamed": "replace this name of the public retrain package: here it is ",
    "none": "a name of the public retrain package, without counterpart here: ",
}


def note_on(name: str) -> str:
    """The replacement of `table.key`, `table` or `kind name` of the public package; empty for any other name."""
    return _notes().get(name, "")


def note_on_entry(name: str) -> str:
    """The same for a key as a campaign's condition names it: `clip_ratio_c`, or `echo_weight` for `[echo] weight`."""
    for path, note in _notes().items():
        table, _, key = path.partition(".")
        if name in (path, key, f"{table}_{key}") or (not key and name.startswith(f"{table}_")):
            return note
    return ""


def missing_name(plugins: Plugins, kind: Kind, name: str, where: str) -> Problem | None:
    """The problem with a name of the public package that no plugin provides; None for any other name."""
    note = note_on(f"{kind} {name}")
    if not note or plugins.find(kind, name):
        return None
    fix = f"{note}; `retrain migrate-config` lists all such names"
    return Problem(code="config.public-name", where=where, what=f"no {kind} named {name!r}", fix=fix)


def names_in(document: Mapping[str, Any], keys: Sequence[Key], plugins: Plugins) -> Iterator[tuple[str, str]]:
    """Path and note of every name of the public package in a configuration that is no name here."""
    known = {key.path: key for key in keys} | {f"{key.table}.{alias}": key for key in keys for alias in key.aliases}
    flat = {key.flag.replace("-", "_"): key for key in keys}
    for table, content in document.items():
        if note := note_on(table):
            yield table, note
        for name, value in _items(content):
            path = f"{table}.{name}"
            if note := _note_on_value(known[path], value, plugins) if path in known else note_on(path):
                yield path, note
            for entry, _ in _items(value):
                if note := note_on(f"{path}.{entry}"):
                    yield f"{path}.{entry}", note
    conditions = dict(_items(document.get("campaign"))).get("conditions")
    for number, condition in enumerate(conditions if isinstance(conditions, list) else (), start=1):
        for name, value in _items(condition):
            key = flat.get(name) or known.get(name)
            if note := _note_on_value(key, value, plugins) if key else note_on_entry(name):
                yield f"condition {number} {name}", note


def _items(content: Any) -> Iterable[tuple[str, Any]]:
    return content.items() if isinstance(content, Mapping) else ()


def _note_on_value(key: Key, value: Any, plugins: Plugins) -> str:
    is_name = key.names is not None and isinstance(value, str) and not plugins.find(key.names, value)
    return note_on(f"{key.names} {value}") if is_name else ""


@cache
def public_names() -> Sequence[tuple[Sequence[str], str, str]]:
    """The rows of the table: names, status (one of `PREFIXES`), and what became of them."""
    text = files(__package__).joinpath("public_package.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["row"]
    return [(row["names"], status, row[status]) for row in rows for status in PREFIXES if status in row]


@cache
def _notes() -> Mapping[str, str]:
    return {name: PREFIXES[status] + note for names, status, note in public_names() for name in names}
