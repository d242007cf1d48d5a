"""Compares what lies on disk with what the ledger says: runs that are gone, changed, copied or never began here.

A contradiction is a fact that cannot be explained by moving or copying whole folders; what the ledger cannot know is
told as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from retrain.kernel.errors import ConfigError
from retrain.rooms.evidence.ledger.history import History, RunHistory
from retrain.rooms.evidence.ledger.place import (
    EMPTY,
    HASHED,
    RUNS,
    folders_below,
    manifest_hashes,
    name_in,
    record_hashes,
)
from retrain.rooms.evidence.runs.campaign_status import CAMPAIGN_MARK
from retrain.rooms.evidence.runs.run_status import MARK
from retrain.rooms.evidence.runs.source import CAMPAIGN_CONTENT
from retrain.rooms.session.records.reading import Record, read_object
from retrain.rooms.session.records.seal import hash_of

METRICS = HASHED[0]
WORDS = {"settings": "the settings in run.json", "inputs": "code and data in run.json"}
RESTORE = "restore it from a backup, or publish with the verdict that it is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that the ledger and the disk do not agree on; `is_certain` False: something that cannot be known."""

    what: str
    fix: str
    is_certain: bool = True

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnDisk:
    """A run's folder as it is now, under the name that the ledger has for it."""

    name: str
    folder: Path
    manifest: Record
    hashes: Mapping[str, str]

    @property
    def started(self) -> str:
        """When it began, as `run.json` has it."""
        return str(self.manifest.get("started", ""))

    @property
    def identity(self) -> tuple[str, str, str]:
        """What a copy or a move of the whole folder keeps."""
        return self.started, str(self.manifest.get("condition")), str(self.manifest.get("seed"))


def read_run(folder: Path, run: Path, *, known_as: str = "") -> RunOnDisk:
    """The run in `run`, named for the ledger in `folder`; its records are hashed."""
    try:
        manifest = read_object(run / MARK)
    except ConfigError:  # whoever reads the run says what is wrong
        manifest = {}
    hashes = record_hashes(run) | manifest_hashes(manifest)
    return RunOnDisk(name=known_as or name_in(folder, run), folder=run, manifest=manifest, hashes=hashes)


class Elsewhere:
    """Finds runs of which the folder was moved or copied: an index of all runs, read when first asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: set[tuple[str, str, str]] | None = None

    def has(self, run: RunHistory) -> bool:
        """Whether a run with this beginning, condition and seed lies anywhere below the ledger's folder."""
        if self._index is None:
            self._index = {_identity(each) for each in folders_below(self._folder)}
        return (run.started, str(run.first.get("condition")), str(run.first.get("seed"))) in self._index


def _identity(run: Path) -> tuple[str, str, str]:
    try:
        manifest = read_object(run / MARK)
    except ConfigError:
        manifest = {}
    return str(manifest.get("started")), str(manifest.get("condition")), str(manifest.get("seed"))


def gone(
    history: History, present: Sequence[RunOnDisk], in_scope: Callable[[RunHistory], bool], elsewhere: Elsewhere
) -> list[Finding]:
    """Runs that began and lie nowhere any more, and runs of a campaign that were run again after they were done."""
    here = {(each.name, each.started) for each in present}
    last = {(run.name, run.opening): run.started for run in history.runs.values()}
    found = []
    for cell, run in history.runs.items():
        if not in_scope(run):
            continue
        later = last[run.name, run.opening]
        is_gone = cell not in here and not elsewhere.has(run)
        again = f"; it was run again at {later}" if later != run.started else ""
        if is_gone:
            found.append(Finding(what=f"{run.name}, begun {run.started}, {_how(run)}, is gone{again}", fix=RESTORE))
        elif again and run.state == "done" and f"/{RUNS}/" in run.name:
            fix = "compare the first one, or publish with the verdict that it was run again"
            found.append(Finding(what=f"{run.name}, begun {run.started}, was done{again}", fix=fix))
    return found


def _how(run: RunHistory) -> str:
    steps = f" after {run.ended.get('steps')} steps" if run.ended else ""
    return f"{run.state}{steps}" if run.ended else "of which no end is on record"


def changed(history: History, present: Iterable[RunOnDisk]) -> list[Finding]:
    """Runs whose records are not those with which they ended."""
    found = []
    for run in present:
        known = history.runs.get((run.name, run.started))
        if known is None or known.ended is None:
            continue
        names = dict.fromkeys([*known.hashes, *run.hashes])
        differing = [WORDS.get(name, name) for name in names if run.hashes.get(name) != known.hashes.get(name)]
        if differing:
            what = f"{run.name}: not as it was when the run ended: {', '.join(differing)}"
            found.append(Finding(what=what, fix=f"restore {run.folder} from a backup, or run it again"))
        elif (status := str(run.manifest.get("status"))) != known.state:
            what = f"{run.name}: run.json says {status}, the run ended {known.state}"
            found.append(Finding(what=what, fix=f"restore {run.folder / MARK}"))
    return found


def copied(history: History, present: Iterable[RunOnDisk]) -> list[Finding]:
    """Runs whose `metrics.jsonl` is that of a run with another beginning, condition or seed, on disk or on record."""
    owners: dict[str, dict[tuple[str, str, str], str]] = {}
    for known in history.runs.values():
        if METRICS in known.hashes:
            identity = known.started, str(known.first.get("condition")), str(known.first.get("seed"))
            owners.setdefault(known.hashes[METRICS], {})[identity] = known.name
    runs = [run for run in present if METRICS in run.hashes and run.hashes[METRICS] != EMPTY]
    for run in runs:
        owners.setdefault(run.hashes[METRICS], {}).setdefault(run.identity, run.name)
    fix = f"restore the {METRICS} of each, or run them again"
    return [
        Finding(what=f"{', '.join(owners[each].values())}: the same {METRICS}, which no two runs write", fix=fix)
        for each in dict.fromkeys(run.hashes[METRICS] for run in runs)
        if len(owners[each]) > 1
    ]


def unseen(history: History, present: Iterable[RunOnDisk], campaign: str = "") -> list[Finding]:
    """Runs that the ledger never saw begin: a contradiction in a campaign that was opened before, else unknown."""
    opening = history.opening(campaign) if campaign else None
    since = str(opening.get("time")) if opening else ""
    found, unknown = [], []
    for run in present:
        known = history.runs.get((run.name, run.started))
        if known is None and since and run.started >= since:
            what = f"{run.name}: the ledger never saw it begin, although it saw its campaign open"
            found.append(Finding(what=what, fix="run it again in its campaign, or leave it out of the comparison"))
        elif known is None or (known.ended is None and run.manifest.get("status") == "done"):
            unknown.append(run.name)
    if unknown:
        names = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        day = (history.since or datetime.now(UTC).isoformat())[:10]  # a ledger that this look begins knows no more
        are = "is" if len(unknown) == 1 else "are"
        what = f"unknown: whether {names} {are} as recorded, and what else was run: the ledger knows nothing"
        what += f" before {day}, or of what was made elsewhere"
        fix = "compare where they were made, or verify the ledger there"
        found.append(Finding(what=what, fix=fix, is_certain=False))
    return found


def of_campaign(history: History, campaign: str, folder: Path) -> list[Finding]:
    """A plan or a definition that is not the one that was sealed, and other campaigns that ask the same."""
    opening = history.opening(campaign)
    if opening is None:
        return []
    found = []
    try:
        manifest = read_object(folder / CAMPAIGN_MARK)
    except ConfigError as error:
        return [Finding(what=f"{campaign}: {error.problems[0].what}", fix=RESTORE)]
    plan = manifest.get("plan")
    now = str(plan.get("sha256", "")) if isinstance(plan, dict) else ""
    if now != (sealed := str(opening.get("plan", ""))):
        what = f"{campaign}: the plan was resealed: it was {sealed[:12] or 'none'} when the campaign began, "
        fix = "restore the plan in manifest.json: `retrain ledger show --json` has the sealed one"
        found.append(Finding(what=what + f"and is {now[:12] or 'none'} now", fix=fix))
    contents = [str(manifest.get("sha256", "")), _content_hash(folder)]
    if any(each and each != str(history.campaigns[campaign][-1].get("content")) for each in contents):
        what = f"{campaign}: {CAMPAIGN_CONTENT} or manifest.json does not define the campaign that was run"
        found.append(Finding(what=what, fix="restore both files from a backup"))
    return found + _others(history, campaign, opening, folder)


def _others(history: History, campaign: str, opening: Record, folder: Path) -> list[Finding]:
    key = "question" if opening.get("question") else "content"
    alike = [
        (name, each)
        for name, openings in history.campaigns.items()
        for each in openings
        if not each.get("continued") and each is not opening and each.get(key) == opening.get(key)
    ]
    asks = "of the same plan" if key == "question" else "of the same conditions and seeds"
    found = []
    for name, each in alike:
        where = "in the same folder" if name == campaign else name
        by = ", by --new" if each.get("new") or opening.get("new") else ""
        is_there = name == campaign or (history.folder / name).exists()
        kept = "" if is_there else ", and it is gone"
        what = f"{campaign}: a second campaign {asks}{by}: {where}, opened {each.get('time')}{kept}"
        found.append(Finding(what=what, fix="publish both, or register another plan for the second"))
    return found


def _content_hash(folder: Path) -> str:
    """The hash that the campaign itself computes of what defines it; empty where the file is missing or damaged."""
    try:
        return hash_of(read_object(folder / CAMPAIGN_CONTENT))
    except ConfigError:
        return ""
