"""Every run and campaign below a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.kernel.errors import Problem, RetrainError
from retrain.records.record_names import ADAPTERS, CAMPAIGN_FILE, EMERGENCE, RUN_FILE
from retrain.records.run import is_run
from retrain.records.runs.campaign_status import CampaignStatus, read_campaign
from retrain.records.runs.run_status import RunStatus, status_of_run

IDLE_S = 24 * 3600.0
CLOSED = frozenset({EMERGENCE, ADAPTERS})  # folders of a run with thousands of files and no runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Campaigns, runs outside them, and how many of both `select` left out."""

    root: Path
    runs: tuple[RunStatus, ...]
    campaigns: tuple[CampaignStatus, ...]
    num_hidden: int = 0

    def select(self, *, everything: bool, only_active: bool) -> Overview:
        """Filter: by default without runs that ended and have been idle for a day."""

        def is_shown(one: RunStatus | CampaignStatus) -> bool:
            if one.is_live or only_active:
                return one.is_live
            return everything or time.time() - one.last_activity_s <= IDLE_S

        runs, campaigns = tuple(filter(is_shown, self.runs)), tuple(filter(is_shown, self.campaigns))
        left_out = len(self.runs) + len(self.campaigns) - len(runs) - len(campaigns)
        return replace(self, runs=runs, campaigns=campaigns, num_hidden=left_out)

    def as_data(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "runs": [run.as_data() for run in self.runs],
            "campaigns": [campaign.as_data() for campaign in self.campaigns],
            "hidden": self.num_hidden,
        }


def scan(root: Path) -> Overview:
    """Return every run and campaign below `root`, sorted by path.

    Only `run.json`, the end of `metrics.jsonl` and the heartbeat of each run are read.
    """
    try:
        os.scandir(root).close()
    except OSError as error:
        what = "no such folder" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        fix = "name the folder that holds your runs: `retrain status DIR`"
        raise RetrainError(Problem(where=str(root), what=what, fix=fix)) from error
    found = list(_marked(root, inside_run=False, seen=set()))
    campaigns = [campaign for folder, mark in found if mark == CAMPAIGN_FILE and (campaign := read_campaign(folder))]
    owners = {campaign.path for campaign in campaigns}
    folders = sorted(folder for folder, mark in found if mark == RUN_FILE)
    runs = [status_of_run(folder) for folder in folders if not owners.intersection(folder.parents)]
    return Overview(root=root, runs=tuple(runs), campaigns=tuple(sorted(campaigns, key=lambda each: each.path)))


def _marked(folder: Path, *, inside_run: bool, seen: set[tuple[int, int]]) -> Iterator[tuple[Path, str]]:
    """Yield folders of runs and campaigns with their marker file. Links are followed; each folder is entered once."""
    try:
        info = folder.stat()
        if (info.st_dev, info.st_ino) in seen:
            return
        seen.add((info.st_dev, info.st_ino))
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError:  # deleted meanwhile, or not readable
        return
    if is_run(folder):
        inside_run = True
        yield folder, RUN_FILE
    elif not inside_run and (folder / CAMPAIGN_FILE).is_file():
        yield folder, CAMPAIGN_FILE
    for name in names:
        if not (inside_run and name in CLOSED):
            yield from _marked(folder / name, inside_run=inside_run, seen=seen)
