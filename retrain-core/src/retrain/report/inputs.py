"""Runs whose code, data, model or plugins differ, and runs that were continued although theirs had changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.records.identity.acceptance import accepted_changes
from retrain.records.identity.changes import Change, changes_between, input_digests
from retrain.records.identity.copies import stored_identity
from retrain.report.gather import Material, ReportRun
from retrain.report.markup import note, table
from retrain.report.text import joined, plural, text

MOST_ROWS = 50
MOST_GROUPS = 8  # of runs with the same inputs, compared with the first


def accepted_alert(material: Material) -> str:
    """A warning about runs that `--resume-anyway` continued: their numbers are not those of one run."""
    found = [(run, change) for run in material.runs for change in accepted_changes(run.record)]
    if not found:
        return ""
    rows = [(text(run.candidate.name), text(change, 600)) for run, change in found[:MOST_ROWS]]
    runs = len({id(run) for run, _ in found})
    head = f"{plural(runs, 'run')} continued with --resume-anyway although something had changed"
    more = note(f"and {len(found) - MOST_ROWS:,} more: see run.json") if len(found) > MOST_ROWS else ""
    body = table("Accepted changes", ("run", "change"), rows, num_names=2, is_caption_shown=False)
    return f'<div class="alert"><h3>{head}</h3>{body}{more}</div>'


def differing_inputs(material: Material) -> str:
    """A warning if runs had different code, data, model files or plugins, with the files by which they differ."""
    groups: dict[tuple[Any, ...], list[ReportRun]] = {}
    for run in material.runs:
        if digests := input_digests(_recorded(run)):
            groups.setdefault(digests, []).append(run)
    if len(groups) < 2:
        return ""
    rows = list(_rows(list(groups.values())[:MOST_GROUPS]))[:MOST_ROWS]
    warning = note("Runs had different code, data, model files or plugins: differences may come from that.")
    heads = ("differs from the first run", "file", "first differing line", "runs")
    return f'<div class="alert">{warning}{table("Inputs", heads, rows, num_names=4, is_caption_shown=False)}</div>'


def _rows(groups: list[list[ReportRun]]) -> Iterator[tuple[str, ...]]:
    first = _inputs_of(groups[0][0])
    for group in groups[1:]:
        names = [run.candidate.name for run in group]
        shown = joined(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
        for change in changes_between(first, _inputs_of(group[0])):
            yield text(f"{change.kind}: {change.what}", 200), text(_place(change), 200), _line(change), shown


def _place(change: Change) -> str:
    return f"{change.name} of {change.owner}" if change.owner and change.owner != change.name else change.name


def _line(change: Change) -> str:
    if not change.line:
        return ""
    return (
        f"<code>{change.line}: {text(change.before, 160)}</code><br><code>{change.line}: {text(change.now, 160)}</code>"
    )


def _recorded(run: ReportRun) -> Mapping[str, Any]:
    found = run.record.get("identity")
    return found if isinstance(found, dict) else {}


def _inputs_of(run: ReportRun) -> Mapping[str, Any]:
    folder = run.candidate.folder
    return stored_identity(folder, run.record) if folder else {}
