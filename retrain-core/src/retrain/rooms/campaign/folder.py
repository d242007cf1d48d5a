"""The folder of a campaign: a new one, or that of the same campaign if it is unfinished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.rooms.campaign.load import Campaign
from retrain.rooms.campaign.manifest import CONTENT, NAME, sha256
from retrain.rooms.session.records.folder import MARK, check_run_folder, move_aside
from retrain.rooms.session.records.lock import RunLock

PARENT = Path("logs")
MOST_DIFFERENCES = 20


@dataclass(slots=True, kw_only=True)
class CampaignFolder:
    """A folder locked until `close`. `before` is the manifest of an earlier session, None for a new campaign."""

    path: Path
    started: datetime
    before: dict[str, Any] | None
    lock: RunLock

    def close(self) -> None:
        """Release the lock."""
        self.lock.release()


def open_campaign(campaign: Campaign, *, is_new: bool) -> CampaignFolder:
    """Lock the folder in which the campaign continues or starts.

    `--resume DIR` means that folder; ResumeError when it holds another campaign. Otherwise `[logging] log_dir`, if
    set, or else the latest folder of this very campaign under `logs/`. With `is_new`, and where there is none, it
    begins: under `logs/campaign_YYYYMMDD_HHMMSS`, or in log_dir, with what was there moved to `<log_dir>.1`, `.2`, ...
    ConfigError when another process has the folder, or it cannot be written.
    """
    started = datetime.now(UTC)
    resume = campaign.config.value("resume.from_", "")
    if resume and is_new:
        fix = "give one of them"
        raise ConfigError(Problem(where="command line", what="--resume and --new contradict each other", fix=fix))
    if resume:
        path = Path(resume).expanduser()
        before = read_manifest(path)
        _refuse_changes(path, before, campaign)
        return _taken(path, started, before)
    if campaign.config.origin("logging.log_dir") != DEFAULT_ORIGIN:
        return _given(Path(campaign.config.logging.log_dir).expanduser(), campaign, started, is_new=is_new)
    if not is_new and (latest := _latest(campaign)):
        return _taken(latest, started, read_manifest(latest))
    return _taken(_free_name(started), started, None)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in `path`; ResumeError if it is missing or not that of a campaign."""
    try:
        content = json.loads((path / NAME).read_text(encoding="utf-8"))
        str(content["sha256"]), [str(run["run_name"]) for run in content["runs"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "give the folder of a campaign that was started: logs/campaign_..."
        raise ResumeError(Problem(where=str(path / NAME), what=what, fix=fix)) from error
    found: dict[str, Any] = content
    return found


def _given(path: Path, campaign: Campaign, started: datetime, *, is_new: bool) -> CampaignFolder:
    check_run_folder(str(path), "", place=campaign.config.place("logging.log_dir"))
    before = _manifest_or_none(path)
    if before is not None and not is_new and before.get("sha256") == sha256(campaign.content()):
        return _taken(path, started, before)
    if (path / NAME).exists() or (path / MARK).exists():
        keep_earlier(path)
    return _taken(path, started, None)


def _taken(path: Path, started: datetime, before: dict[str, Any] | None) -> CampaignFolder:
    check_run_folder(str(path), "", place="campaign folder")
    path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(path)
    if before is not None:
        before = read_manifest(path)  # read again under the lock: another process may have written it
    return CampaignFolder(path=path, started=started, before=before, lock=lock)


def _latest(campaign: Campaign) -> Path | None:
    wanted = sha256(campaign.content())
    for file in sorted(PARENT.glob(f"campaign_*/{NAME}"), reverse=True):
        found = _manifest_or_none(file.parent)
        if found is not None and found.get("sha256") == wanted:
            return file.parent
    return None


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


def _refuse_changes(path: Path, before: Mapping[str, Any], campaign: Campaign) -> None:
    if before.get("sha256") == sha256(campaign.content()):
        return
    found = _differences(_content_of(path), campaign.content())
    shown = found[:MOST_DIFFERENCES]
    if len(found) > MOST_DIFFERENCES:
        shown.append(f"and {len(found) - MOST_DIFFERENCES} more differences")
    shown.append("new runs would not be comparable with those already there; nothing was changed")
    fix = "restore these values, or start a new campaign without --resume"
    raise ResumeError(Problem(where=str(path), what="it is a different campaign", why="\n    ".join(shown), fix=fix))


def _content_of(path: Path) -> Any:
    try:
        return json.loads((path / CONTENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "restore the file, or start a new campaign without --resume"
        raise ResumeError(Problem(where=str(path / CONTENT), what=f"cannot be read: {error}", fix=fix)) from error


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        inner = (_differences(before.get(name), now.get(name), f"{path} {name}".strip()) for name in names)
        return [difference for differences in inner for difference in differences]
    return [] if before == now else [f"{path} was {_shown(before)} and is now {_shown(now)}"]


def _shown(value: Any) -> str:
    return "absent" if value is None else "set" if isinstance(value, dict) else repr(value)
