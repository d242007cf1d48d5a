"""Settings of the runs: those common to all, and those that differ between conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.records.reading import Record
from retrain.records.runs.settings_key import FREE_KEYS, FREE_TABLES

ABSENT = "—"
MOST_VALUES = 3  # shown per key and condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Settings by condition: `values[condition][key]`, only keys that differ between conditions or within one."""

    keys: tuple[str, ...]
    values: Mapping[str, Mapping[str, str]]


def differences(records: Mapping[str, Sequence[Record]]) -> Differences:
    """`records` are the `run.json` of each condition's runs. Seeds, paths and settings without effect are left out."""
    seen: dict[str, dict[str, dict[str, None]]] = {label: {} for label in records}
    for label, group in records.items():
        for record in group:
            for key, value in _flat(_table(record, "config")):
                seen[label].setdefault(key, {})[value] = None
    present = {label: found for label, found in seen.items() if found}
    keys = sorted({key for found in present.values() for key in found})
    shown = {label: {key: _joined(found.get(key, {ABSENT: None})) for key in keys} for label, found in present.items()}
    differing = tuple(key for key in keys if len({values[key] for values in shown.values()}) > 1 or _varies(key, seen))
    return Differences(
        keys=differing, values={label: {key: values[key] for key in differing} for label, values in shown.items()}
    )


def common(records: Iterable[Record], path: str) -> list[str]:
    """The distinct values of `table.key` of a record, in order of appearance."""
    found: dict[str, None] = {}
    for record in records:
        value: Any = record
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, ""):
            found[_shown(value)] = None
    return list(found)


def versions(records: Iterable[Record]) -> dict[str, list[str]]:
    """Every distribution and library with the versions that runs had; python first."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        packages = {"python": record.get("python"), **_table(record, "distributions"), **_table(record, "libraries")}
        for name, version in packages.items():
            if isinstance(version, str):
                found.setdefault(name, {})[version] = None
    return {name: list(each) for name, each in found.items()}


def _varies(key: str, seen: Mapping[str, Mapping[str, Mapping[str, None]]]) -> bool:
    return any(len(found.get(key, {})) > 1 for found in seen.values())


def _joined(values: Mapping[str, None]) -> str:
    listed = list(values)
    more = f" and {len(listed) - MOST_VALUES} more" if len(listed) > MOST_VALUES else ""
    return " | ".join(listed[:MOST_VALUES]) + more


def _flat(tables: Record) -> Iterable[tuple[str, str]]:
    for table, keys in tables.items():
        if table in FREE_TABLES or not isinstance(keys, dict):
            continue
        for key, value in keys.items():
            if (path := f"{table}.{key}") not in FREE_KEYS:
                yield path, _shown(value)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _table(record: Record, name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}
