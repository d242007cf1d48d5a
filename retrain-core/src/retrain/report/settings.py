"""The differences between runs: settings by condition; inputs, code and versions, where none is expected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from retrain.records.identity.changes import changes_between
from retrain.records.identity.copies import input_digests
from retrain.records.reading import Record, table_of
from retrain.records.run import Run, compared_settings
from retrain.report.gather import Material, ReportRun
from retrain.report.parts import Box, Code, Piece, Section, Table, note
from retrain.text.amounts import ABSENT, first_few

MOST_VALUES = 3  # shown per key and condition
MOST_COLUMNS = 10
MOST_ROWS = 50
# Each group of runs with other inputs is compared with the first, file by file.
MOST_GROUPS = 8
VALUE_CHARS = 120


def settings_section(material: Material) -> Section | None:
    if len(material.runs) < 2:
        return None
    found = differences({label: [run.record for run in material.of(label)] for label in material.source.conditions})
    same = note("No setting differs except for seeds, paths and settings that do not affect training.")
    keys = list(next(iter(found.values()), ()))
    parts = (_settings_table(found, keys) if keys else same, _differing_inputs(material), _mixed(material))
    return Section("settings", "Differences", parts)


def differences(records: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, str]]:
    """Return by condition the settings that differ between conditions or within one; the same keys for each.

    `records` are the `run.json` of each condition's runs. Seeds, paths and settings without effect are omitted.
    """
    seen: dict[str, dict[str, dict[str, None]]] = {label: {} for label in records}
    for label, group in records.items():
        for record in group:
            for key, value in compared_settings(record):
                seen[label].setdefault(key, {})[_shown(value)] = None
    present = {label: found for label, found in seen.items() if found}
    keys = sorted({key for found in present.values() for key in found})
    shown = {key: {label: _joined(found.get(key, {ABSENT: None})) for label, found in present.items()} for key in keys}
    varying = {key for found in present.values() for key, values in found.items() if len(values) > 1}
    differing = [key for key in keys if len(set(shown[key].values())) > 1 or key in varying]
    return {label: {key: shown[key][label] for key in differing} for label in present}


def common(records: Iterable[Record], path: str) -> list[str]:
    """Return the distinct values of `table.key` in records, in order of appearance; tuned numbers in four digits."""
    *tables, key = path.split(".")
    values = (table_of(record, *tables).get(key) for record in records)
    brief = (float(f"{value:.4g}") if type(value) is float else value for value in values)
    return list(dict.fromkeys(_shown(value) for value in brief if value not in (None, "")))


def versions(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return every distribution and library with the versions that runs had; python first."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        python = {"python": record.get("python")}
        packages = python | {**table_of(record, "distributions"), **table_of(record, "libraries")}
        for name, version in packages.items():
            if isinstance(version, str):
                found.setdefault(name, {})[version] = None
    return {name: list(each) for name, each in found.items()}


def _settings_table(found: Mapping[str, Mapping[str, str]], keys: Sequence[str]) -> Table:
    """Return the settings as rows, or the conditions if there are more of them."""
    title, labels = "Settings that differ", list(found)
    rows: list[tuple[Piece, ...]]
    if len(keys) <= len(labels) or len(labels) > MOST_COLUMNS:
        rows = [(label, *map(_cell, values.values())) for label, values in found.items()]
        return Table(title, ("condition", *keys), rows, num_names=99)
    rows = [(Code([key]), *(_cell(values[key]) for values in found.values())) for key in keys]
    return Table(title, ("setting", *labels), rows, num_names=99)


def _cell(value: str) -> Code:
    return Code([value[:VALUE_CHARS] + ("…" if len(value) > VALUE_CHARS else "")])


def _mixed(material: Material) -> Box | None:
    """Return a warning if runs used different code or packages: a comparison of them is unfair."""
    records = [run.record for run in material.runs]
    named = {
        **versions(records),
        "git commit": [commit[:12] for commit in common(records, "git.commit")],
        "system": common(records, "hardware.system"),
    }
    rows = [(name, ", ".join(each[:20])) for name, each in named.items() if len(each) > 1]
    if not rows:
        return None
    warning = note("Runs were not all made with the same code and packages: differences may come from that.")
    return Box("alert", "", (warning, Table("Mixed", ("part", "values"), rows, num_names=2, is_caption_shown=False)))


def _differing_inputs(material: Material) -> Box | None:
    """Return a warning if runs had different code, data, model files or plugins, with the differing files."""
    groups: dict[tuple[Any, ...], list[ReportRun]] = {}
    for run in material.runs:
        if digests := input_digests(table_of(run.record, "identity")):
            groups.setdefault(digests, []).append(run)
    if len(groups) < 2:
        return None
    rows = list(_input_rows(list(groups.values())[:MOST_GROUPS]))[:MOST_ROWS]
    warning = note("Runs had different code, data, model files or plugins: differences may come from that.")
    heads = ("differs from the first run", "file", "first differing line", "runs")
    return Box("alert", "", (warning, Table("Inputs", heads, rows, num_names=4, is_caption_shown=False)))


def _input_rows(groups: list[list[ReportRun]]) -> Iterator[tuple[Piece, ...]]:
    first = _inputs_of(groups[0][0])
    for group in groups[1:]:
        shown = first_few([run.candidate.name for run in group], 5)
        for change in changes_between(first, _inputs_of(group[0])):
            lines = [f"{change.line}: {each}" for each in (change.before, change.now)] if change.line else []
            place = f"{change.name} of {change.owner}" if change.owner not in ("", change.name) else change.name
            yield f"{change.kind}: {change.what}", place, Code(lines), shown


def _inputs_of(run: ReportRun) -> Mapping[str, Any]:
    folder = run.candidate.folder
    return Run(folder).identity if folder else {}


def _joined(values: Mapping[str, None]) -> str:
    more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
    return " | ".join([*values][:MOST_VALUES]) + more


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
