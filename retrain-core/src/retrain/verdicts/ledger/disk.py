"""Compares runs on disk with the ledger: runs that are gone, changed, copied or never began here.

A contradiction is a fact that moving or copying whole folders cannot explain; the rest is reported as unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from retrain.records.reading import Record, number
from retrain.records.record_names import METRICS, RUN_FILE
from retrain.records.run import Run
from retrain.text.amounts import first_few
from retrain.verdicts.ledger.chain import learned_by, manifest_hashes, name_in, record_hashes
from retrain.verdicts.ledger.history import History, Identity, RunHistory, Setup, folders_below

# The hash of an empty file: runs that failed early share it, and are no copies of each other.
EMPTY = hashlib.sha256().hexdigest()
WORDS = {"settings": "the settings in run.json", "inputs": "code and data in run.json"}
RESTORE = "restore it from a backup, or publish with the verdict that it is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A disagreement of the ledger and the disk; `is_certain` False: something that cannot be known."""

    what: str
    fix: str
    is_certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnDisk:
    """A run's folder now; `known` is the same run in the ledger, None if the ledger never saw it begin."""

    name: str
    folder: Path
    manifest: Record
    hashes: Mapping[str, str]
    known: RunHistory | None = None

    @property
    def started(self) -> str:
        return str(self.manifest.get("started", ""))

    @property
    def identity(self) -> Identity:
        """The facts that a copy or a move of the whole folder keeps."""
        return _identity(self.manifest)

    @property
    def setup(self) -> Setup:
        """Condition, seed and settings, on record or in `run.json` if it is unknown."""
        return self.known.setup if self.known else (*self.identity[1:], learned_by(self.manifest))


def read_run(folder: Path, run: Path) -> RunOnDisk:
    """Return the run in `run`, named for the ledger in `folder`, with hashes of its records."""
    manifest = Run(run).record
    hashes = record_hashes(run) | manifest_hashes(manifest)
    return RunOnDisk(name=name_in(folder, run), folder=run, manifest=manifest, hashes=hashes)


def in_ledger(history: History, runs: Iterable[RunOnDisk]) -> list[RunOnDisk]:
    named = [(name_in(history.folder, run.folder), run) for run in runs]
    return [replace(run, name=name, known=history.known(name, run.identity, run.hashes)) for name, run in named]


@dataclass
class Elsewhere:
    """Finds runs below a ledger's folder that were moved or copied."""

    folder: Path

    @cached_property
    def runs(self) -> dict[Identity, Path]:
        return {_identity(Run(each).record): each for each in folders_below(self.folder)}

    def unknown(self, history: History, campaign: Path) -> Iterator[RunOnDisk]:
        """Yield runs outside a campaign's folder that the ledger never saw begin, without hashes."""
        for folder in folders_below(self.folder):
            if campaign.resolve() in folder.resolve().parents:
                continue
            run = RunOnDisk(name=name_in(self.folder, folder), folder=folder, manifest=Run(folder).record, hashes={})
            if run.manifest and history.known(run.name, run.identity, {}) is None:
                yield run


def _identity(manifest: Record) -> Identity:
    return str(manifest.get("started", "")), str(manifest.get("condition")), str(manifest.get("seed"))


def gone(
    history: History, present: Sequence[RunOnDisk], in_scope: Callable[[RunHistory], bool], elsewhere: Elsewhere
) -> list[Finding]:
    """Return runs that are in no folder any more, or were started again although they had a finished step."""
    here = {id(each.known): each.folder for each in present if each.known}
    # By folder and campaign, the last start on record: any earlier one was run again.
    last = {(run.name, run.opening): run.started for run in history.runs.values()}
    found = []
    for run in filter(in_scope, history.runs.values()):
        later = last[run.name, run.opening]
        again = f"; it was run again at {later}" if later != run.started else ""
        folder = here.get(id(run)) or elsewhere.runs.get(run.identity) if again or id(run) not in here else None
        if folder is None and id(run) not in here:
            found.append(Finding(what=f"{run.name}, begun {run.started}, {_how(run)}, is gone{again}", fix=RESTORE))
            continue
        num_steps = number(run.ended.get("steps")) if run.ended else Run(folder).num_steps if folder else 0
        if again and run.campaign and num_steps:
            was = "was done" if run.state == "done" else _how(run)
            what = f"{run.name}, begun {run.started}, {was}{again}"
            fix = "compare the first one, or publish with the verdict that it was run again"
            found.append(Finding(what=what, fix=fix, is_certain=run.state != "failed"))
    return found


def _how(run: RunHistory) -> str:
    return f"{run.state} after {run.ended.get('steps')} steps" if run.ended else "of which no end is on record"


def changed(history: History, present: Iterable[RunOnDisk]) -> list[Finding]:
    """Return runs whose records differ from those with which they ended."""
    found = []
    for run in present:
        known = run.known
        if known is None and (named := history.runs.get((run.name, run.started))):
            was, now = (f"{each[1]}, seed {each[2]}" for each in (named.identity, run.identity))
            what = f"{run.name}: run.json says {now}; it was run as {was}"
            found.append(Finding(what=what, fix=f"restore {run.folder / RUN_FILE}"))
        if known is None or known.ended is None:
            continue
        names = dict.fromkeys([*known.hashes, *run.hashes])
        differing = [WORDS.get(name, name) for name in names if run.hashes.get(name) != known.hashes.get(name)]
        if differing:
            what = f"{run.name}: changed since the run ended: {', '.join(differing)}"
            found.append(Finding(what=what, fix=f"restore {run.folder} from a backup, or run it again"))
        elif (status := str(run.manifest.get("status"))) != known.state:
            what = f"{run.name}: run.json says {status}, the run ended {known.state}"
            found.append(Finding(what=what, fix=f"restore {run.folder / RUN_FILE}"))
    return found


def copied(history: History, present: Iterable[RunOnDisk]) -> list[Finding]:
    """Return runs with the `metrics.jsonl` of a run with another beginning, condition or seed, on disk or on record."""
    owners: dict[str, dict[Identity, str]] = {}
    for known in history.runs.values():
        if METRICS in known.hashes:
            owners.setdefault(known.hashes[METRICS], {})[known.identity] = known.name
    runs = [run for run in present if METRICS in run.hashes and run.hashes[METRICS] != EMPTY]
    for run in runs:
        owners.setdefault(run.hashes[METRICS], {}).setdefault(run.identity, run.name)
    fix = f"restore the {METRICS} of each, or run them again"
    return [
        Finding(what=f"{', '.join(owners[each].values())}: the same {METRICS}; no two runs write one", fix=fix)
        for each in dict.fromkeys(run.hashes[METRICS] for run in runs)
        if len(owners[each]) > 1
    ]


def unseen(history: History, present: Iterable[RunOnDisk], opening: Record | None = None) -> list[Finding]:
    """Return runs that the ledger never saw begin: a contradiction in a campaign that was opened before."""
    since = str(opening.get("time")) if opening else ""
    found, unknown = [], []
    for run in present:
        known = run.known
        if known is None and since and run.started >= since:
            what = f"{run.name}: the ledger never saw it begin, although it saw its campaign open"
            found.append(Finding(what=what, fix="run it again in its campaign, or leave it out of the comparison"))
        elif known is None or (known.ended is None and run.manifest.get("status") == "done"):
            unknown.append(run.name)
    if unknown:
        # A ledger that begins with this look knows nothing of earlier days.
        day = (history.since or datetime.now(UTC).isoformat())[:10]
        are = "is" if len(unknown) == 1 else "are"
        what = (
            f"unknown: whether {first_few(unknown)} {are} as recorded, and what else was run: the ledger knows nothing"
        )
        what += f" before {day}, or of other machines"
        fix = "compare where they were made, or verify the ledger there"
        found.append(Finding(what=what, fix=fix, is_certain=False))
    return found
