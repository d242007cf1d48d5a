"""`retrain compare --ledger`: verifies a ledger and everything on disk that it covers, or prints its events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from retrain.records.record_names import CAMPAIGN_FILE, RUN_FILE, RUNS
from retrain.text.amounts import first_few
from retrain.text.terminal_text import printable
from retrain.verdicts.ledger import disk
from retrain.verdicts.ledger.campaigns import check_campaign, find_campaign, run_before, unreadable
from retrain.verdicts.ledger.chain import NAME, ledger_folder, name_in
from retrain.verdicts.ledger.history import History, folders_below, read_chain, read_history

FOLDER = Path("logs")
HIDDEN_FIELDS = ("time", "kind", "previous", "sha256", "hashes")
VALUE_CHARS = 80


def verify(folder: Path | None, *, head: str, as_json: bool) -> int:
    """Check the chain of hashes with an earlier `head`, and runs and campaigns against it; return the exit code."""
    history = _history(folder, known_head=head)
    found = [*check_all(history, known_head=head), *_undeclared(history.folder)]
    if names := [run.name for run in history.runs.values() if run.ended is None]:
        what = f"unknown: no end of {first_few(names)} is on record, so the files cannot be verified"
        fix = "it runs or was killed: wait for it, or end it with --resume"
        found.append(disk.Finding(what=what, fix=fix, is_certain=False))
    wrong = [each for each in found if each.is_certain]
    if as_json:
        data = {"file": str(history.file), "intact": not wrong, "since": history.since or None}
        data |= {"lines": history.num_lines, "head": history.head}
        findings = [{"what": each.what, "fix": each.fix, "certain": each.is_certain} for each in found]
        click.echo(json.dumps(data | {"findings": findings}, indent=2))
    else:
        for each in found:
            click.echo(printable(f"{'wrong: ' if each.is_certain else ''}{each.what}"))
            click.echo(printable(f"  fix: {each.fix}"))
        num_stepless = sum(run.ended is not None and not run.ended.get("steps") for run in history.runs.values())
        runs = f"{len(history.runs)} runs" + (f", {num_stepless} of them ended without a step" if num_stepless else "")
        counts = f"{history.num_lines} lines since {history.since}, {runs}, {len(history.looks)} looks"
        state = f"{len(wrong)} do{'es' if len(wrong) == 1 else ''} not match" if wrong else "intact"
        click.echo(f"{history.file}: {state} ({counts})\nlast hash: {history.head}")
    return EXIT_FAILED if wrong else EXIT_DONE


def show(folder: Path | None, *, as_json: bool) -> int:
    place = _history(folder).folder
    for entry in read_chain(place / NAME):
        if as_json and entry.record:
            click.echo(json.dumps(entry.record))
        elif entry.record:
            texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in entry.record.items()}
            shown = {n: text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}..." for n, text in texts.items()}
            fields = [f"{name}={text}" for name, text in shown.items() if name not in HIDDEN_FIELDS]
            click.echo(printable("  ".join([texts.get("time", ""), texts.get("kind", ""), *fields])))
        elif not as_json:
            click.echo(f"line {entry.line}: {entry.fault or 'torn'}")
    return EXIT_DONE


def _history(folder: Path | None, *, known_head: str = "") -> History:
    path = folder or FOLDER
    is_inside = any((path / mark).is_file() for mark in (CAMPAIGN_FILE, RUN_FILE))
    place = ledger_folder(path) if is_inside and not (path / NAME).exists() else path
    if not (place / NAME).exists():
        what = "has no ledger" if place.is_dir() else "no such folder"
        fix = "give the folder that holds runs or campaigns; the next run begins a ledger there"
        raise ConfigError(Problem(code="ledger.missing", where=str(place), what=what, fix=fix))
    history = read_history(place, known_head=known_head)
    if not history.num_lines and not history.is_torn:
        what, fix = "holds no event, so nothing can be verified", "restore it from a backup, if it held some"
        raise ConfigError(Problem(code="ledger.empty", where=str(history.file), what=what, fix=fix))
    return history


def _undeclared(folder: Path) -> Iterator[disk.Finding]:
    """Yield undeclared differences between conditions, campaign by campaign."""
    from retrain.records.runs.source import find_runs  # only this command needs a study
    from retrain.records.runs.undeclared import undeclared

    for campaign in campaigns_below(folder):
        try:
            source = find_runs([campaign])
        except ConfigError:  # reported by the checks of the campaign
            continue
        runs = [each for each in source.candidates if each.folder and not each.problem]
        if runs:
            fix = "run those again, or declare the difference as a condition"
            for line in undeclared(source, runs, runs[0].condition):
                what = f"{campaign.name}: a condition differs in more than it says: {line}"
                yield disk.Finding(what=what, fix=fix)


def check_all(history: History, *, known_head: str = "") -> Iterator[disk.Finding]:
    """Yield everything that is broken, does not match, or cannot be known; the published `known_head` must exist."""
    fix = "restore the ledger from a backup; its lines after this one are unreliable"
    yield from (disk.Finding(what=f"{history.file}: {fault}", fix=fix) for fault in history.faults)
    if known_head and not history.has_known_head:
        what = f"{history.file}: no line has the hash {known_head[:12]}: the ledger was cut or rewritten since then"
        yield disk.Finding(what=what, fix="restore the ledger from a backup")
    if history.is_torn:
        what = f"{history.file}: the last line was cut by a kill while it was written; the next event removes it"
        yield disk.Finding(what=what, fix="nothing: a torn line was never on record", is_certain=False)
    folders = folders_below(history.folder)
    present = disk.in_ledger(history, (disk.read_run(history.folder, run) for run in folders))
    yield from disk.gone(history, present, lambda run: True, disk.Elsewhere(history.folder))
    yield from disk.changed(history, present)
    yield from disk.copied(history, present)
    by_campaign: dict[str, list[disk.RunOnDisk]] = {}
    for run in present:
        by_campaign.setdefault(run.name.rpartition(f"/{RUNS}/")[0], []).append(run)
    for folder in campaigns_below(history.folder):
        name = name_in(history.folder, folder)
        runs = by_campaign.pop(name, [])
        try:
            campaign = find_campaign(history, folder, runs)
        except ConfigError as error:
            yield unreadable(name, error)
            continue
        yield from check_campaign(history, campaign, runs)
        if campaign.manifest.get("plan"):
            strangers = (run for run in present if run.known is None and run not in runs)
            yield from run_before(campaign, runs, strangers)
        yield from disk.unseen(history, runs, campaign.opening)
    for runs in by_campaign.values():
        yield from disk.unseen(history, runs)


def campaigns_below(folder: Path) -> list[Path]:
    return [file.parent for file in sorted(folder.glob(f"*/{CAMPAIGN_FILE}")) if (file.parent / RUNS).is_dir()]
