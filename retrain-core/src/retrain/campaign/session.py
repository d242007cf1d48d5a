"""One session of a campaign: opens its folder, runs the missing runs, records and prints the outcome."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import click
import tomli_w

from retrain.campaign.folder import CampaignFolder, open_campaign
from retrain.campaign.launching import Launcher
from retrain.campaign.load import Campaign, load_campaign, warnings_of
from retrain.campaign.looks import PlannedLooks, StudyJudge
from retrain.campaign.manifest import CampaignRecord, Manifest, new_content
from retrain.campaign.planned import PlannedRun, State, is_done, plan_runs
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUps, Schedule, Stops
from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem, ResumeError, RetrainError, StopRequested
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Kind
from retrain.records.files import write_json, write_text
from retrain.records.identity.changes import Change, changes_between
from retrain.records.identity.inputs import places_entry
from retrain.records.manifest import public_values
from retrain.records.reading import time_now
from retrain.records.record_names import CAMPAIGN_CONTENT, CAMPAIGN_FILE, CONFIG_FILE
from retrain.records.run import Run
from retrain.run.backend import ENTRY, KEY, RunDevices
from retrain.run.check import identity_of
from retrain.run.tables import registered_tables
from retrain.text.amounts import counted, duration
from retrain.text.command_options import config_argument, quiet_option
from retrain.text.terminal_text import OUTCOME_LEVEL, printable, program

THROTTLE = "tinker_throttle"
CARRIED = ("status", "attempts", "started", "ended", "returncode", "error", "followed_up", "follow_up_error")
# These fields grow with a campaign; all others never change.
OF_THE_CONTENT = ("sha256", "conditions", "seeds", "num_runs", "runs")
SHOWN_FAILURES = 10


def run_campaign(
    campaign: Campaign, plugins: Plugins, *, is_new: bool = False, is_beyond_plan: bool = False, is_quiet: bool = False
) -> None:
    """Run the missing runs of a campaign; `is_quiet` prints only warnings, failures and the outcome.

    `is_new` and `is_beyond_plan` are passed to `open_campaign`. RetrainError when a run failed after its retries,
    StopRequested when a signal ended the session.
    """
    opening = {"is_new": is_new, "is_beyond_plan": is_beyond_plan}
    with closing(open_campaign(campaign, plugins, **opening)) as folder:
        _session(campaign, plugins, folder, is_quiet=is_quiet, opening=opening)


def _session(
    campaign: Campaign, plugins: Plugins, folder: CampaignFolder, *, is_quiet: bool, opening: Mapping[str, bool]
) -> None:
    runs = plan_runs(campaign, folder.path, folder.before, folder.growth.devices)
    lines = Lines(len(runs), parallel=campaign.table.parallel, is_quiet=is_quiet)
    tables = registered_tables(plugins)
    identities = {each.label: identity_of(each.config, plugins, tables).as_data() for each in campaign.conditions}
    changed = changed_runs(runs, identities)
    if not campaign.config.resume.anyway:
        refuse_changed(changed, campaign, str(folder.path))
    needed = _needed(runs, folder.before) if folder.before and folder.before.get("status") == State.DONE else []
    if needed and all(map(is_done, needed)):
        done = f"all {len(needed)} runs are done in {folder.path}. `--new` starts another campaign."
        for told in (f"Already complete: {done}", *changed.notes):
            lines.say(told, OUTCOME_LEVEL)
        return
    _say_head(campaign, folder, changed, lines)
    launcher = launcher_of(campaign, plugins)
    stops, began = Stops(), time.monotonic()
    try:
        manifest = _manifest(campaign, plugins, runs, folder, changed)
        record = CampaignRecord(folder.path, lines, continues=folder.before is not None)
        record.opened(manifest.content, **opening)
        judge = StudyJudge.of(campaign, folder.path)
        looks = PlannedLooks(campaign, judge, manifest.content.get("looks", ())) if judge else None

        def scheduled(
            runs: Sequence[PlannedRun], manifest: Manifest, record: CampaignRecord, lines: Lines, **others: Any
        ) -> Schedule:
            return Schedule(
                campaign,
                runs,
                workers=min(campaign.table.max_workers or len(runs), len(runs)) if campaign.table.parallel else 1,
                throttle_dir=folder.path / THROTTLE if campaign.table.parallel else None,
                manifest=manifest,
                launcher=launcher,
                lines=lines,
                follow_ups=FollowUps(campaign, plugins, folder.path, frozenset(manifest.content["tables"])),
                stops=stops,
                record=record,
                **others,
            )

        with stops.installed():
            if tune := campaign.table.tune:
                # Only a tuned campaign loads Optuna.
                from retrain.campaign.tuning import Tuning

                devices = folder.growth.devices
                given: dict[str, Any] = {"devices": devices, "scheduled": scheduled, "stops": stops, "lines": lines}
                runs = Tuning(campaign=campaign, tune=tune, folder=folder.path, **given).run(runs, manifest)
            with lines.shown():
                schedule = scheduled(runs, manifest, record, lines, looks=looks)
                schedule.run()
    finally:
        launcher.close()
    started = [run for run in runs if run.name in schedule.attempts]
    for line in changed_runs(started, identities, words=lambda change: change.file or change.name).lines:
        lines.say(f"note: changed during the campaign: {line}", logging.WARNING)
    _conclude(manifest, runs, schedule, stops, lines, time.monotonic() - began, folder, record)


def _say_head(campaign: Campaign, folder: CampaignFolder, changed: ChangedRuns, lines: Lines) -> None:
    if folder.notice:
        lines.say(f"note: {folder.notice}", logging.WARNING)
    lines.head(campaign, str(folder.path))
    for told in _device_notes(folder):
        lines.say(told, OUTCOME_LEVEL)
    if folder.growth.adds_runs:
        lines.say(f"  added: {folder.growth}; existing runs are not repeated", OUTCOME_LEVEL)
    for warning in (*warnings_of(campaign), *changed.notes):
        lines.say(f"  note: {warning}", logging.WARNING)


def _device_notes(folder: CampaignFolder) -> list[str]:
    """A line for each choice of devices that was not configured."""
    chosen = (each for each in folder.growth.devices.values() if each.why)
    return list(dict.fromkeys(f"  devices: {each.config.backend.devices} ({each.why})" for each in chosen))


def _manifest(
    campaign: Campaign, plugins: Plugins, runs: list[PlannedRun], folder: CampaignFolder, changed: ChangedRuns
) -> Manifest:
    """Write the manifest before the first run starts, with the records of an earlier session about the runs."""
    content = new_content(campaign, runs, folder.started)
    if folder.before:
        earlier = {entry["run_name"]: entry for entry in folder.before["runs"]}
        for entry in content["runs"]:
            entry |= {name: earlier.get(entry["run_name"], {}).get(name, entry.get(name)) for name in CARRIED}
        content = {**content, **folder.before, **{name: content[name] for name in OF_THE_CONTENT}}
    if folder.growth.adds_runs:
        added = {"seeds": list(folder.growth.seeds), "conditions": list(folder.growth.conditions)}
        content["grown"] = [*content.get("grown", []), {"time": time_now(), **added}]
    if changed.by_change:
        content["accepted"] = [*content.get("accepted", []), {"time": time_now(), "changes": changed.lines}]
    if devices := {label: each.entry[ENTRY] for label, each in folder.growth.devices.items()}:
        content["devices"] = content.get("devices", {}) | devices
    manifest = Manifest(folder.path, content)
    # Targets of the paths of the campaign and of each condition: its runs read the same inputs in later sessions.
    tables = registered_tables(plugins)
    configs = [campaign.config, *(condition.config for condition in campaign.conditions)]
    entries = [places_entry(config, tables, plugins, folder.path) for config in configs]
    unique = {(*each["keys"], each["written"]): each for entry in reversed(entries) for each in reversed(entry["keys"])}
    manifest.change(
        status=State.RUNNING,
        parallel=campaign.table.parallel,
        max_workers=campaign.workers,
        launcher=campaign.table.launcher,
        runner_pid=os.getpid(),
        paths={**entries[0], "keys": list(reversed(unique.values()))},
    )
    # Before `campaign.json`: a manifest that is ahead of it matches the campaign by its hash.
    manifest.save()
    write_json(folder.path / CAMPAIGN_CONTENT, campaign.content())
    write_text(folder.path / CONFIG_FILE, _config_toml(campaign, folder.growth.devices))
    return manifest


def _config_toml(campaign: Campaign, devices: Mapping[str, RunDevices]) -> str:
    """The resolved campaign as a TOML file that `retrain --resume FOLDER` reads, with the `devices` in use."""
    own: dict[str, Any] = campaign.table.model_dump(mode="json", by_alias=True, exclude_none=True)
    tables = {"campaign": own | {"max_steps": campaign.max_steps}} | public_values(campaign.config)
    if campaign.config.origin(KEY) == DEFAULT_ORIGIN:
        del tables["backend"]["devices"]
        if used := next((each.config.backend.devices for each in devices.values() if each.why), ""):
            tables["backend"]["devices"] = used
    return tomli_w.dumps({name: table for name, table in tables.items() if table})


def launcher_of(campaign: Campaign, plugins: Plugins) -> Launcher:
    context = PluginContext(config=campaign.config, seeds=Seeds(0), plugins=plugins)
    name, options = campaign.table.launcher, campaign.table.launcher_options
    launcher: Launcher = build_part(
        Kind.LAUNCHER, name, "campaign.launcher", context, options, "campaign.launcher_options"
    )
    return launcher


def _conclude(
    manifest: Manifest,
    runs: list[PlannedRun],
    schedule: Schedule,
    stops: Stops,
    lines: Lines,
    seconds: float,
    opened: CampaignFolder,
    record: CampaignRecord,
) -> None:
    folder, failures, needed = opened.path, schedule.failures, _needed(runs, manifest.content)
    num_done = sum(map(is_done, runs))
    has_failed = failures or schedule.cannot_look
    status = State.STOPPED if stops.reason else State.FAILED if has_failed else State.DONE
    manifest.change(status=status, runner_pid=None)
    manifest.save()
    record.ended(status, done=num_done, failed=len(failures))
    counts = f"{num_done} of {len(needed)} runs done, {len(failures)} failed"
    if saved := len(runs) - len(needed):
        counts += f"; the planned looks saved {saved} of {len(runs)}"
    lines.say(f"Campaign {status}: {counts} ({duration(seconds)})", OUTCOME_LEVEL)
    lines.say(f"  manifest: {folder / CAMPAIGN_FILE}", OUTCOME_LEVEL)
    for told in _device_notes(opened):
        lines.say(told, OUTCOME_LEVEL)
    if stops.reason:
        lines.say("  the same command finishes the missing runs", OUTCOME_LEVEL)
        stop = StopRequested(stops.reason)
        stop.folder = folder
        raise stop
    if failures:
        shown = [f"{name}: {reason}" for name, reason in list(failures.items())[:SHOWN_FAILURES]]
        more = [f"and {len(failures) - SHOWN_FAILURES} more"] if len(failures) > SHOWN_FAILURES else []
        fix = f"see stderr.log under {folder / 'runs'}; the same command retries them"
        what, why = f"{len(failures)} of {len(needed)} runs failed", "\n    ".join([*shown, *more])
        raise RetrainError(Problem(code="campaign.failed-runs", where=str(folder), what=what, why=why, fix=fix))
    if schedule.cannot_look:
        raise schedule.cannot_look
    for verb in ("compare", "report"):
        lines.say(f"  next: {program()} {verb} {shlex.quote(str(folder))}", OUTCOME_LEVEL)


def _needed(runs: list[PlannedRun], manifest: Mapping[str, Any]) -> list[PlannedRun]:
    """The runs without those that the planned looks saved."""
    saved = {entry["run_name"] for entry in manifest["runs"] if entry.get("status") == State.NOT_NEEDED}
    return [run for run in runs if run.name not in saved]


MOST_CHANGES, MOST_NAMES = 10, 8

Identities = Mapping[str, Mapping[str, Any]]  # by condition, in the form of `Identity.as_data`


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRuns:
    """Runs that were made with other code, data or plugins, by change. `unknown` ones recorded no code and data."""

    by_change: Mapping[str, Sequence[str]]
    unknown: Sequence[str]
    num_runs: int

    @property
    def lines(self) -> list[str]:
        told = [f"{change}  ({_listed(names)})" for change, names in list(self.by_change.items())[:MOST_CHANGES]]
        return told + [f"and {len(self.by_change) - MOST_CHANGES} more changes"] * (len(self.by_change) > MOST_CHANGES)

    @property
    def notes(self) -> list[str]:
        """The changes that the user accepted, and the runs that cannot be compared."""
        told = [f"made with other code or data than the present: {line}" for line in self.lines]
        listed = [_listed(self.unknown)] if self.unknown else []
        return told + [f"made by an earlier version that recorded no code and data: {each}" for each in listed]


def changed_runs(runs: Iterable[PlannedRun], now: Identities, *, words: Callable[[Change], str] = str) -> ChangedRuns:
    """Compare every run that has begun with a new run of its condition; `words` describes a change."""
    by_change: dict[str, list[str]] = {}
    unknown, num_changed = [], 0
    for run in runs:
        with suppress(ResumeError):  # has not begun, or is damaged: then it starts again
            manifest, current = Run(run.folder).started_manifest(), now[run.condition.label]
            name = f"{run.name}, done" if is_done(run) else run.name
            if not isinstance(manifest.get("identity"), dict):
                unknown.append(name)
            elif _refused(manifest["identity"], current):  # by digest, without reading the parts
                num_changed += 1
                for change in _refused(Run(run.folder).identity, current):
                    by_change.setdefault(printable(words(change)), []).append(name)
    return ChangedRuns(by_change=by_change, unknown=unknown, num_runs=num_changed)


def refuse_changed(changed: ChangedRuns, campaign: Campaign, folder: str) -> None:
    """ResumeError that names every change and its runs, unless there is no change."""
    if not changed.by_change:
        return
    other, total = changed.num_runs, campaign.num_runs
    what = f"{other} of its {total} runs were made with code or data that has changed since"
    why = "\n    ".join([*changed.lines, "runs of different code cannot be compared; nothing was changed"])
    fix = (
        f"take the changes back; or run all {total} again with --new (these are kept); or insist with "
        "--resume-anyway: finished runs stay, the rest uses the present code and data, and that is recorded"
    )
    raise ResumeError(Problem(code="campaign.changed-inputs", where=folder, what=what, why=why, fix=fix))


def _refused(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    return [change for change in changes_between(before, now) if change.refuses]


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{counted(len(names), 'run')}: {'; '.join(names[:MOST_NAMES])}{more}"


EPILOG = """\b
Examples:
  retrain campaign.toml                       run it, or finish the missing runs
  retrain campaign.toml --campaign-parallel   runs in parallel
  retrain campaign.toml -q                    only failures and the outcome
  retrain --resume logs/campaign_20260103     finish the campaign in that folder

\b
Exit codes: 0 all runs are done; 1 a run failed after its retries; 2 usage or configuration error;
            75 stopped by a signal, the same command continues.
"""


@click.command(
    "campaign", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG
)
@click.option("--new", "is_new", is_flag=True, help="Start a new campaign even if this one was run before.")
@click.option("--beyond-plan", is_flag=True, help="Add seeds or conditions to a campaign whose plan is sealed.")
@quiet_option("Print only warnings, failures and the outcome.")
@config_argument("CONFIG [--KEY VALUE]...")
@click.pass_obj
def command(plugins: Plugins, is_new: bool, beyond_plan: bool, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Run the conditions x seeds of CONFIG; run it again to finish missing or added runs.

    Flags override the keys of all runs. `--resume DIR` finishes the campaign in that folder.
    """
    campaign = load_campaign(arguments, plugins)
    if "campaign" not in campaign.file_tables:
        what, fix = "has no [campaign] table", "add one: `retrain init --template campaign` shows how"
        where = campaign.config.source or "command line"
        raise ConfigError(Problem(code="campaign.no-table", where=where, what=what, fix=fix))
    run_campaign(campaign, plugins, is_new=is_new, is_beyond_plan=beyond_plan, is_quiet=is_quiet)
