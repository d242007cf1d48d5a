"""State of a campaign, from its `manifest.json` and its runs, and of everything below a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.records.reading import integers_in, number, read_object, table_of, tables_in, text
from retrain.records.record_names import ADAPTERS, CAMPAIGN_FILE, EMERGENCE, RUN_FILE
from retrain.records.run import is_run
from retrain.records.runs import run_status
from retrain.records.runs.run_status import RunStatus, iso_time, last_change_s, status_of_run

NOT_NEEDED = "not needed"  # the status in the manifest of a run that the planned looks saved
FAILED = ("failed", "dead", "unreadable")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """One cell of a campaign; `status` is None until the run has a folder. Unless `is_needed`, the looks saved it."""

    condition: str
    seed: int | None
    name: str
    status: RunStatus | None
    has_failed: bool
    is_needed: bool = True
    has_ended: bool = True

    def as_data(self) -> dict[str, Any]:
        head = {"condition": self.condition, "seed": self.seed, "run_name": self.name, "failed": self.has_failed}
        absent = {"path": None, "status": "not started" if self.is_needed else NOT_NEEDED}
        return (self.status.as_data() if self.status else absent) | head


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignStatus:
    """One campaign: `done` if every run is, `running` while anything is active, otherwise `partial` or `dead`."""

    path: Path
    conditions: tuple[str, ...]
    seeds: tuple[int, ...]
    max_steps: int | None
    num_runs: int
    runs: tuple[CampaignRun, ...]
    state: str
    campaign_toml: str
    timestamp: str
    runner_pid: int | None
    runner_is_alive: bool
    last_activity_s: float
    planned_looks: tuple[int, ...] = ()
    looks_taken: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.state == "running"

    @property
    def num_completed(self) -> int:
        return sum(_is_done(run) for run in self.runs)

    @property
    def num_saved(self) -> int:
        """Runs that the planned looks saved."""
        return sum(not run.is_needed for run in self.runs)

    def run_of(self, condition: str, seed: int) -> CampaignRun | None:
        return next((run for run in self.runs if (run.condition, run.seed) == (condition, seed)), None)

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        by_cell = {(run.condition, run.seed): run.status for run in reversed(self.runs)}
        rates = {cell: status.correct_rate for cell, status in by_cell.items() if status}
        kept = ("max_steps", "num_runs", "campaign_toml", "timestamp", "runner_pid")
        return {
            "path": str(self.path),
            "conditions": list(self.conditions),
            "seeds": list(self.seeds),
            **{name: getattr(self, name) for name in kept},
            "completed": self.num_completed,
            "failed": sum(run.has_failed for run in self.runs),
            "runs": [run.as_data() for run in self.runs],
            "matrix": {
                label: {str(seed): rates.get((label, seed)) for seed in self.seeds} for label in self.conditions
            },
            "status": self.state,
            "runner_alive": self.runner_is_alive,
            "last_activity": iso_time(self.last_activity_s),
            "looks": {"planned": list(self.planned_looks), "taken": list(self.looks_taken), "saved": self.num_saved},
        }


def read_campaign(folder: Path) -> CampaignStatus | None:
    """Return the campaign in `folder`; None if its `manifest.json` is not a campaign's."""
    try:
        manifest = read_object(folder / CAMPAIGN_FILE)
    except ConfigError:
        return None
    entries = manifest.get("runs")
    if not isinstance(entries, list) or "conditions" not in manifest:
        return None
    runs = tuple(_campaign_run(folder, entry) for entry in tables_in(entries))
    listed = manifest["conditions"] if isinstance(manifest["conditions"], list) else []
    labels = [label for label in listed if isinstance(label, str)]
    pid = run_status.process_id(manifest.get("runner_pid"))
    is_alive = pid is not None and run_status.process_is_alive(pid)
    max_steps, num_runs = number(manifest.get("max_steps")), number(manifest.get("num_runs"))
    activity_s = [last_change_s(folder / CAMPAIGN_FILE), *(run.status.last_activity_s for run in runs if run.status)]
    return CampaignStatus(
        path=folder,
        conditions=tuple(dict.fromkeys((*labels, *(run.condition for run in runs)))),
        seeds=tuple(dict.fromkeys(run.seed for run in runs if run.seed is not None)),
        max_steps=None if max_steps is None else int(max_steps),
        num_runs=len(runs) if num_runs is None else int(num_runs),
        runs=runs,
        state=_state(runs, is_alive=is_alive),
        campaign_toml=text(manifest.get("campaign_toml")),
        timestamp=text(manifest.get("timestamp")),
        runner_pid=pid,
        runner_is_alive=is_alive,
        last_activity_s=max(activity_s),
        planned_looks=integers_in(table_of(manifest, "plan").get("looks")),
        looks_taken=integers_in([look.get("seeds") for look in tables_in(manifest.get("looks"))]),
    )


def _campaign_run(folder: Path, entry: Mapping[str, Any]) -> CampaignRun:
    name, seed = text(entry.get("run_name")), entry.get("seed")
    # The first holds even if the campaign was moved, while `log_dir` would then lead to another copy.
    candidates = [folder / "runs" / name, Path(text(entry.get("log_dir")))]
    found = next((path for path in candidates if path.name and is_run(path)), None)
    status = status_of_run(found) if found else None
    is_done, recorded = status is not None and status.state == "done", text(entry.get("status"))
    is_failed = status.state in FAILED if status else entry.get("returncode") not in (None, 0)
    return CampaignRun(
        condition=text(entry.get("condition")),
        seed=seed if type(seed) is int else None,
        name=name,
        status=status,
        has_failed=is_failed,
        is_needed=found is not None or recorded != NOT_NEEDED,
        has_ended=is_done or (recorded == "failed" if recorded else status is not None and is_failed),
    )


def _state(runs: Sequence[CampaignRun], *, is_alive: bool) -> str:
    needed = [run for run in runs if run.is_needed]
    if needed and all(_is_done(run) for run in needed):
        return "done"
    if is_alive or any(run.status and run.status.is_live for run in runs):
        return "running"
    return "partial" if any(_is_done(run) for run in runs) else "dead"


def _is_done(run: CampaignRun) -> bool:
    return run.status is not None and run.status.state == "done"


def progress_text(campaign: CampaignStatus) -> str:
    """`3/6 runs done, 1 failed, 1 of 2 looks taken, the next after 6 seeds`."""
    failed = sum(run.has_failed for run in campaign.runs)
    found = [f"{campaign.num_completed}/{campaign.num_runs - campaign.num_saved} runs done"]
    found += [f"{failed} failed"] if failed else []
    if campaign.planned_looks:
        found.append(f"{len(campaign.looks_taken)} of {len(campaign.planned_looks)} looks taken")
        later = [look for look in campaign.planned_looks if look > max(campaign.looks_taken, default=0)]
        if campaign.num_saved:
            found.append(f"{campaign.num_saved} runs saved")
        elif later:
            found.append(f"the next after {later[0]} seeds")
    return ", ".join(found)


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
    """Return every run and campaign below `root`, sorted by path, from the ends of their files."""
    try:
        os.scandir(root).close()
    except OSError as error:
        what = "no such folder" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        fix = "name the folder that holds your runs: `retrain status DIR`"
        raise RetrainError(Problem(code="run.no-such-folder", where=str(root), what=what, fix=fix)) from error
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
        # by device and inode, since links may lead in a circle
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
