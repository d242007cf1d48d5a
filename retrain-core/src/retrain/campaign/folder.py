"""The folder of a campaign: a new one, or an earlier one to which seeds and conditions may be added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import click

from retrain.campaign.load import Campaign
from retrain.campaign.planned import State
from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.records.files import RunLock, hash_of
from retrain.records.folder import check_run_folder, move_aside
from retrain.records.reading import read_regular
from retrain.records.record_names import CAMPAIGN_CONTENT, CAMPAIGN_FILE
from retrain.records.run import is_run
from retrain.run.backend import KEY, RunDevices, choose_devices
from retrain.text.amounts import first_few

PARENT = Path("logs")
OWN_MACHINE = "subprocess"  # the launcher whose runs are on this machine
MOST_CHANGES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The runs that a campaign adds to an earlier session of it, and `changes`: other differences, each as a sentence.

    `devices` are those that its runs use, by condition.
    """

    seeds: tuple[int, ...] = ()
    conditions: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    devices: Mapping[str, RunDevices] = field(default_factory=dict)

    @property
    def adds_runs(self) -> bool:
        return bool(self.seeds or self.conditions)

    def __str__(self) -> str:
        added = [f"seeds {', '.join(map(str, self.seeds))}"] * bool(self.seeds)
        return "; ".join([*added, *(f"condition {label}" for label in self.conditions)])


def growth_since(path: Path, before: Mapping[str, Any], campaign: Campaign, plugins: Plugins) -> Growth:
    """Compare `campaign` with the one in `path`, whose manifest is `before`.

    A key that the earlier version of retrain did not know counts as its default. ResumeError when `campaign.json`, the
    record of the earlier configuration, is missing or damaged.
    """
    content = campaign.content()
    if before.get("sha256") == hash_of(content):
        devices, moved = campaign_devices(campaign, plugins, before, {})
        return Growth(changes=tuple(moved), devices=devices)
    then, now = _content_of(path), json.loads(json.dumps(content, default=str))
    defaults = json.loads(json.dumps({key.path: key.default for key in campaign.keys}, default=str))
    old, new = then["conditions"], now["conditions"]
    devices, moved = campaign_devices(campaign, plugins, before, {label: old[label].get(KEY, "") for label in old})
    seeds = [seed for seed in now["seeds"] if seed not in then["seeds"]]
    changes = list(moved)
    if set(then["seeds"]) - set(now["seeds"]):
        changes.append(f"seeds was {then['seeds']} and is now {now['seeds']}")
    for name in ("devices_per_run", "plan", "factors", "tune"):
        changes += _differences(then.get(name), now.get(name), name)
    for label, values in old.items():
        if label not in new:
            changes.append(f"condition {label} was set and is now absent")
            continue
        now_used = new[label] | ({KEY: values[KEY]} if label in devices and KEY in values else {})  # compared above
        changes += _differences({**defaults, **values}, {**defaults, **now_used}, f"conditions {label}")
    added = tuple(label for label in new if label not in old)
    return Growth(seeds=tuple(seeds), conditions=added, changes=tuple(changes), devices=devices)


def rerun_sentence(before: Mapping[str, Any], campaign: Campaign) -> str:
    """Say how much a new campaign would run again."""
    num_done = sum(entry.get("status") == State.DONE for entry in before["runs"])
    kept = f"; {num_done} of the {len(before['runs'])} earlier ones are done" if num_done else ""
    return f"a new campaign runs all {campaign.num_runs} runs from their first step{kept}"


def _content_of(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(read_regular(path / CAMPAIGN_CONTENT))
        list(content["seeds"]), [dict(values) for values in content["conditions"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "restore the file, or start a new campaign with --new and without --resume"
        where = str(path / CAMPAIGN_CONTENT)
        raise ResumeError(Problem(code="campaign.damaged", where=where, what=what, fix=fix)) from error
    return content


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        inner = (_differences(before.get(name), now.get(name), f"{path} {name}".strip()) for name in names)
        return [difference for differences in inner for difference in differences]
    then, current = (
        "absent" if value is None else "set" if isinstance(value, dict) else repr(value) for value in (before, now)
    )
    return [] if before == now else [f"{path} was {then} and is now {current}"]


@dataclass(slots=True, kw_only=True)
class CampaignFolder:
    """A folder locked until `close`. `before` is the manifest of an earlier session, None for a new campaign.

    `growth` is this session's addition, with the devices of its runs; `notice` is shown before anything runs.
    """

    path: Path
    started: datetime
    before: dict[str, Any] | None
    lock: RunLock
    growth: Growth
    notice: str = ""

    def close(self) -> None:
        self.lock.release()


def open_campaign(
    campaign: Campaign, plugins: Plugins, *, is_new: bool, is_beyond_plan: bool = False
) -> CampaignFolder:
    """Lock the folder in which the campaign continues, grows or starts.

    `--resume DIR` means that folder. Otherwise `[logging] log_dir`, if set, or the latest folder of this very
    campaign under `logs/`, or of the same file with fewer seeds or conditions. With `is_new`, or without such a folder,
    it begins: under `logs/campaign_YYYYMMDD_HHMMSS`, or in log_dir, whose contents are moved to `<log_dir>.1`, `.2`,
    ... ResumeError when DIR or log_dir holds another campaign, or one whose sealed plan has fewer seeds or conditions
    (unless `is_beyond_plan`). ConfigError when another process has the folder, or it cannot be written.
    """
    started, notice = datetime.now(UTC), ""
    before: dict[str, Any] | None
    resume, log_dir = campaign.config.resume.from_, campaign.config.logging.log_dir
    if resume and is_new:
        what, fix = "--resume and --new contradict each other", "give one of them"
        raise ConfigError(Problem(code="campaign.resume-and-new", where="command line", what=what, fix=fix))
    if resume:
        path = Path(resume).expanduser()
        before, instead = read_manifest(path), "start a new campaign without --resume"
    elif campaign.config.origin("logging.log_dir") != DEFAULT_ORIGIN:
        path = Path(log_dir).expanduser()
        check_run_folder(str(path), "", place=campaign.config.place("logging.log_dir"))
        before = None if is_new else _manifest_or_none(path)
        instead = "start another campaign with --new: it keeps this one next to the new folder"
    else:
        latest, notice = (None, "") if is_new else _latest(campaign, plugins)
        plain = PARENT / f"campaign_{started:%Y%m%d_%H%M%S}"
        later = (plain.with_name(f"{plain.name}_{number}") for number in count(2))
        free = next(path for path in chain([plain], later) if not path.exists())
        path, before = latest or free, read_manifest(latest) if latest else None
        instead = "start another campaign with --new"
    if before is None:
        growth = Growth(devices=campaign_devices(campaign, plugins, None, {})[0])
        if (path / CAMPAIGN_FILE).exists() or is_run(path):
            keep_earlier(path)
    else:
        growth = growth_since(path, before, campaign, plugins)
        _check_growth(path, before, campaign, growth, instead=instead, is_beyond_plan=is_beyond_plan)
    check_run_folder(str(path), "", place="campaign folder")
    path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(path)
    # Read again under the lock, because another session may have ended in the meantime.
    before = before and read_manifest(path)
    return CampaignFolder(path=path, started=started, before=before, lock=lock, growth=growth, notice=notice)


def _check_growth(
    path: Path, before: Mapping[str, Any], campaign: Campaign, growth: Growth, *, instead: str, is_beyond_plan: bool
) -> None:
    """ResumeError if more than added seeds or conditions differs, or if these are beyond a sealed plan."""
    if growth.changes:
        more = len(growth.changes) - MOST_CHANGES
        shown = [*growth.changes[:MOST_CHANGES], *([f"and {more} more differences"] if more > 0 else [])]
        shown += [f"{growth} would be added"] * growth.adds_runs
        shown.append("new runs would not be comparable with those already there; nothing was changed")
        what, why = "it is a different campaign", "\n    ".join([*shown, rerun_sentence(before, campaign)])
        fix = f"restore these values, or {instead}"
        raise ResumeError(Problem(code="campaign.different", where=str(path), what=what, why=why, fix=fix))
    if growth.adds_runs and before.get("plan") and not is_beyond_plan:
        what = f"its plan is sealed, and {growth} would be added"
        why = "additions after the first results are known were not planned; nothing was changed"
        fix = "add them with --beyond-plan, and `retrain compare` reports the departure; or register a plan with --new"
        raise ResumeError(Problem(code="campaign.plan-sealed", where=str(path), what=what, why=why, fix=fix))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in `path`; ResumeError if it is missing or not a campaign's."""
    try:
        content: dict[str, Any] = json.loads(read_regular(path / CAMPAIGN_FILE))
        str(content["sha256"]), [str(run["run_name"]) for run in content["runs"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "give the folder of a campaign that was started: logs/campaign_..."
        where = str(path / CAMPAIGN_FILE)
        raise ResumeError(Problem(code="campaign.not-a-campaign", where=where, what=what, fix=fix)) from error
    return content


def _manifest_or_none(path: Path) -> dict[str, Any] | None:
    with suppress(ResumeError):
        return read_manifest(path)
    return None


def _latest(campaign: Campaign, plugins: Plugins) -> tuple[Path | None, str]:
    """The latest folder under `logs/` that this campaign continues or grows; otherwise how the latest one differs.

    Growth and differences are considered only for folders of the same file.
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
        with suppress(ResumeError):  # it cannot be resumed, so it is passed over
            growth = growth_since(path, before, campaign, plugins)
            if not growth.changes:
                return path, ""
            differences = first_few(growth.changes)
            notice = notice or f"another campaign than {path}: {differences}; {rerun_sentence(before, campaign)}"
    return None, notice


def keep_earlier(path: Path) -> None:
    """Rename the folder of an earlier attempt to `<name>.1`, `.2`, ... and print its new name."""
    click.echo(f"Moved the earlier contents of {path} to {move_aside(path)}")


def campaign_devices(
    campaign: Campaign, plugins: Plugins, before: Mapping[str, Any] | None, configured: Mapping[str, str]
) -> tuple[dict[str, RunDevices], list[str]]:
    """The devices that the runs of each condition use on this machine, and changes from earlier ones.

    `before` is the manifest of an earlier session, whose runs keep their devices unless the file sets others.
    `configured` are the devices in its configuration by condition, if they differ. ConfigError when
    configured devices are missing. Empty for a launcher that may start runs on other machines: each run chooses there.
    """
    if campaign.table.launcher != OWN_MACHINE:
        return {}, []
    recorded = (before or {}).get("devices")
    entries = recorded.items() if isinstance(recorded, dict) else ()
    known = {label: entry for label, entry in entries if isinstance(entry, dict) and "used" in entry}
    unset = [each.label for each in campaign.conditions if each.config.origin(KEY) == DEFAULT_ORIGIN]
    alike = next((known[label] for label in unset if label in known), None)  # runs of new conditions use them, too
    chosen: dict[str, RunDevices] = {}
    changes = []
    for condition in campaign.conditions:
        label, config = condition.label, condition.config
        entry = known.get(label) or (alike if label in unset else None)
        is_new = before is None or not any(run.get("condition") == label for run in before["runs"])
        if entry is None and is_new:
            chosen[label] = choose_devices(config, plugins)
            continue
        then = entry["used"] if entry else configured.get(label, config.backend.devices)
        chosen[label] = choose_devices(config, plugins, {"devices": entry or {"used": then}})
        if entry and label not in unset:  # they were configured since
            chosen[label] = replace(chosen[label], why="")
        if (now := chosen[label].config.backend.devices) != then:
            changes.append(f"conditions {label} {KEY} was {then!r} and is now {now!r}")
    return chosen, changes
