"""Columns of a row by name, nested by dots, and the message about a name that no row has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from retrain.kernel.errors import Problem
from retrain.text.terminal_text import printable

MOST_SHOWN = 40


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return a column, or a field inside one (`reward_model.ground_truth`); None when it is missing."""
    if key in values:
        return values[key]
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def column_names(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the names of all columns, and of the fields below them as `a.b`."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, Mapping):
            yield from column_names(value, f"{above}{name}.")


def unknown_column(key: str, columns: Collection[str], *, where: str, named_by: str) -> Problem:
    """Return the problem with a key that is not in `columns`: it lists them, and proposes the nearest."""
    near = get_close_matches(key, columns, n=1)
    shown = [*columns][:MOST_SHOWN]
    more = f", and {len(columns) - MOST_SHOWN} more" if len(columns) > MOST_SHOWN else ""
    known = printable(", ".join(shown)) + more if columns else "none"
    fix = f"use {near[0]!r}" if near else "name a column that exists"
    why = f"named by {named_by}; columns: {known}"
    return Problem(code="data.column-missing", where=where, what=f"no column {key!r}", why=why, fix=fix)
