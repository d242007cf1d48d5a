"""Verifies a ledger: its chain, and everything on disk that it covers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from retrain.kernel.errors import ConfigError
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.verdicts.ledger import disk
from retrain.verdicts.ledger.campaigns import check_campaign, find_campaign, run_before, unreadable
from retrain.verdicts.ledger.history import History
from retrain.verdicts.ledger.place import RUNS, folders_below, name_in

TORN = "the last line was cut by a kill while it was written; the next event removes it"


def check_all(history: History, *, known_head: str = "") -> Iterator[disk.Finding]:
    """Everything that is broken, does not match, or cannot be known; the runs are hashed, one after another.

    `known_head` is a hash that was published: the ledger must still have it.
    """
    fix = "restore the ledger from a backup; what it says after this line cannot be relied on"
    yield from (disk.Finding(what=f"{history.file}: {fault}", fix=fix) for fault in history.faults)
    if known_head and not history.has_known_head:
        what = f"{history.file}: no line has the hash {known_head[:12]}: the ledger was cut or rewritten since then"
        yield disk.Finding(what=what, fix="restore the ledger from a backup")
    if history.is_torn:
        fix = "nothing is to be done: a torn line was never on record"
        yield disk.Finding(what=f"{history.file}: {TORN}", fix=fix, is_certain=False)
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
    """The campaigns that the ledger in `folder` covers."""
    return [file.parent for file in sorted(folder.glob(f"*/{CAMPAIGN_FILE}")) if (file.parent / RUNS).is_dir()]
