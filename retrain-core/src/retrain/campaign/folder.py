"""The folder of a campaign: a new one, or that of the same campaign, which seeds and conditions may be added to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from retrain.campaign.growth import Growth, growth_since, refusal, rerun_sentence
from retrain.campaign.load import Campaign
from retrain.campaign.settled import settle_campaign
from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.records.files import hash_of
from retrain.records.folder import check_run_folder, move_aside
from retrain.records.lock import RunLock
from retrain.records.reading import read_regular
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.records.run import is_run

PARENT = Path("logs")


@dataclass(slots=True, kw_only=True)
class CampaignFolder:
    """A folder locked until `close`. `before` is the manifest of an earlier session, None for a new campaign.

    `growth` is what this session adds to it, with the devices that its runs use; the user is told `notice` before
    anything runs.
    """

    path: Path
    started: datetime
    before: dict[str, Any] | None
    lock: RunLock
    growth: Growth
    notice: str = ""

    def close(self) -> None:
        """Release the lock."""
        self.lock.release()


def open_campaign(
    campaign: Campaign, plugins: Plugins, *, is_new: bool, is_beyond_plan: bool = False
) -> CampaignFolder:
    """Lock the folder in which the campaign continues, grows or starts.

    `--resume DIR` means that folder. Otherwise `[logging] log_dir`, if set, or else the latest folder of this very
    campaign under `logs/`, or of the same file with fewer seeds or conditions. With `is_new`, and where there is none,
    it begins: under `logs/campaign_YYYYMMDD_HHMMSS`, or in log_dir, with what was there moved to `<log_dir>.1`, `.2`,
    ... ResumeError when DIR or log_dir holds another campaign, or one whose sealed plan has fewer seeds or conditions
    (unless `is_beyond_plan`). ConfigError when another process has the folder, or it cannot be written.
    """
    started = datetime.now(UTC)
    resume = campaign.config.resume.from_
    if resume and is_new:
        fix = "give one of them"
        raise ConfigError(Problem(where="command line", what="--resume and --new contradict each other", fix=fix))
    if resume:
        path, fix = Path(resume).expanduser(), "restore these values, or start a new campaign without --resume"
        return _continued(path, read_manifest(path), campaign, plugins, started, fix=fix, is_beyond_plan=is_beyond_plan)
    if campaign.config.origin("logging.log_dir") != DEFAULT_ORIGIN:
        path = Path(campaign.config.logging.log_dir).expanduser()
        check_run_folder(str(path), "", place=campaign.config.place("logging.log_dir"))
        before = _manifest_or_none(path)
        if before is not None and not is_new:
            fix = "restore these values, or start another campaign with --new: it keeps this one beside the new folder"
            return _continued(path, before, campaign, plugins, started, fix=fix, is_beyond_plan=is_beyond_plan)
        fresh = Growth(devices=settle_campaign(campaign, plugins, None, {})[0])
        if (path / CAMPAIGN_FILE).exists() or is_run(path):
            keep_earlier(path)
        return _taken(path, started, None, growth=fresh)
    notice = ""
    if not is_new:
        latest, notice = _latest(campaign, plugins)
        if latest is not None:
            fix = "restore these values, or start another campaign with --new"
            before = read_manifest(latest)
            return _continued(latest, before, campaign, plugins, started, fix=fix, is_beyond_plan=is_beyond_plan)
    fresh = Growth(devices=settle_campaign(campaign, plugins, None, {})[0])
    return _taken(_free_name(started), started, None, growth=fresh, notice=notice)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in `path`; ResumeError if it is missing or not that of a campaign."""
    try:
        content = json.loads(read_regular(path / CAMPAIGN_FILE))
        str(content["sha256"]), [str(run["run_name"]) for run in content["runs"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "give the folder of a campaign that was started: logs/campaign_..."
        raise ResumeError(Problem(where=str(path / CAMPAIGN_FILE), what=what, fix=fix)) from error
    found: dict[str, Any] = content
    return found


def _continued(
    path: Path,
    before: dict[str, Any],
    campaign: Campaign,
    plugins: Plugins,
    started: datetime,
    *,
    fix: str,
    is_beyond_plan: bool,
) -> CampaignFolder:
    """The folder of an earlier session, unless the campaign differs from it in more than added seeds or conditions."""
    growth = growth_since(path, before, campaign, plugins)
    if growth.changes:
        raise refusal(path, before, campaign, growth, fix=fix)
    if growth.adds_runs and before.get("plan") and not is_beyond_plan:
        what = f"its plan is sealed, and {growth} would be added"
        why = "what is added after the first results are known was not planned; nothing was changed"
        fix = "add them with --beyond-plan, and `retrain compare` reports the departure; or register a plan with --new"
        raise ResumeError(Problem(where=str(path), what=what, why=why, fix=fix))
    return _taken(path, started, before, growth=growth)


def _taken(
    path: Path, started: datetime, before: dict[str, Any] | None, *, growth: Growth, notice: str = ""
) -> CampaignFolder:
    check_run_folder(str(path), "", place="campaign folder")
    path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(path)
    if before is not None:
        before = read_manifest(path)  # read again under the lock: another process may have written it
    return CampaignFolder(path=path, started=started, before=before, lock=lock, growth=growth, notice=notice)


def _latest(campaign: Campaign, plugins: Plugins) -> tuple[Path | None, str]:
    """The latest folder under `logs/` that this campaign continues or grows; without one, how the latest one differs.

    The latter two only among folders of the same file.
    """
    wanted, of_this_file = hash_of(campaign.content()), list[tuple[Path, dict[str, Any]]]()
    for file in sorted(PARENT.glob(f"campaign_*/{CAMPAIGN_FILE}"), reverse=True):
        found = _manifest_or_none(file.parent)
        if found is not None and found.get("sha256") == wanted:
            return file.parent, ""
        if found is not None and found.get("campaign_toml") == campaign.config.source:
            of_this_file.append((file.parent, found))
    notice = ""
    for path, before in of_this_file:
        try:
            growth = growth_since(path, before, campaign, plugins)
        except ResumeError:  # a campaign that nobody can continue is in nobody's way
            continue
        if not growth.changes:
            return path, ""
        told = f"another campaign than {path}: {'; '.join(growth.changes[:3])}"
        more = f" and {len(growth.changes) - 3} more differences" if len(growth.changes) > 3 else ""
        notice = notice or f"{told}{more}; {rerun_sentence(before, campaign)}"
    return None, notice


def _manifest_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(path)
    except ResumeError:
        return None


def _free_name(started: datetime) -> Path:
    plain = PARENT / f"campaign_{started:%Y%m%d_%H%M%S}"
    path, number = plain, 1
    while path.exists():
        number += 1
        path = plain.with_name(f"{plain.name}_{number}")
    return path


def keep_earlier(path: Path) -> None:
    """Rename the folder of an earlier attempt to `<name>.1`, `.2`, ... and print where it went."""
    click.echo(f"Moved the earlier contents of {path} to {move_aside(path)}")
