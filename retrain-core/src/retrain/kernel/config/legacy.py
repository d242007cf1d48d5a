"""Keys of earlier versions: refused, with the lines that replace them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import tomli_w

from retrain.kernel.errors import Problem


def moved(content: Mapping[str, Any], legacy_keys: Mapping[str, str]) -> dict[str, Any]:
    """The values of a table's legacy keys at their present place, `{"options": {"port": 1}}`.

    `legacy_keys` maps an old name to the new one, `key` or `key.entry`. An entry already in the table wins.
    """
    found: dict[str, Any] = {}
    for old in (name for name in content if name in legacy_keys):
        key, _, entry = legacy_keys[old].partition(".")
        if entry:
            found.setdefault(key, {})[entry] = content[old]
        else:
            found[key] = content[old]
    for key, value in found.items():
        present = content.get(key)
        if isinstance(value, dict) and isinstance(present, Mapping):
            found[key] = value | dict(present)
    return found


def legacy_problem(
    table: str, content: Mapping[str, Any], legacy_keys: Mapping[str, str], file: object, lines: Mapping[str, int]
) -> Problem:
    """One problem for all legacy keys of a table, at least one. `lines` maps `table.key` to its line."""
    names = [name for name in content if name in legacy_keys]
    what = f"legacy keys, removed: {', '.join(names)}" if len(names) > 1 else "legacy key, removed"
    block = tomli_w.dumps({table: moved(content, legacy_keys)}).strip().replace("\n", "\n        ")
    fix = f"`retrain migrate-config {shlex.quote(str(file))} --write` writes in their place\n        {block}"
    where = f"{file}:{lines.get(f'{table}.{names[0]}', 1)} [{table}] {names[0]}"
    return Problem(code="config.legacy-key", where=where, what=what, fix=fix)
