"""Runs of a campaign that were made with other code, data or plugins than a run started now would be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from retrain.campaign.load import Campaign
from retrain.campaign.outcome import is_done
from retrain.campaign.planned import PlannedRun
from retrain.kernel.errors import Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.records.identity.changes import Change, changes_between
from retrain.records.run import Run
from retrain.run.check import registered_tables
from retrain.run.selected import identity_of
from retrain.text.terminal_text import printable

MOST_CHANGES, MOST_NAMES = 10, 8

Identities = Mapping[str, Mapping[str, Any]]  # by condition, in the form of `Identity.as_data`


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRuns:
    """The runs behind each change that makes them different runs. `unknown` ones recorded no code and data."""

    by_change: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: Sequence[str] = ()
    num_runs: int = 0

    @property
    def lines(self) -> list[str]:
        """A line per change with the names of its runs."""
        told = [f"{change}  ({_listed(names)})" for change, names in list(self.by_change.items())[:MOST_CHANGES]]
        return told + [f"and {len(self.by_change) - MOST_CHANGES} more changes"] * (len(self.by_change) > MOST_CHANGES)

    @property
    def notes(self) -> list[str]:
        """What is told when the user insists, and where nothing can be told."""
        told = [f"made with other code or data than those of now: {line}" for line in self.lines]
        if self.unknown:
            listed = _listed(self.unknown)
            told.append(f"made by an earlier version, which recorded no code and data: {listed}")
        return told


def current_identities(campaign: Campaign, plugins: Plugins) -> Identities:
    """Code, data, model files and plugins of each condition as they are now."""
    tables = registered_tables(plugins)
    return {each.label: identity_of(each.config, plugins, tables).as_data() for each in campaign.conditions}


def changed_runs(runs: Iterable[PlannedRun], now: Identities, *, told: Callable[[Change], str] = str) -> ChangedRuns:
    """Compare every run that has begun with what a run of its condition would be made of; `told` words a change."""
    by_change: dict[str, list[str]] = {}
    unknown, changed = [], 0
    for run in runs:
        with suppress(ResumeError):  # has not begun, or is damaged: then it begins anew
            manifest, current = Run(run.folder).started_manifest(), now[run.condition.label]
            if not isinstance(manifest.get("identity"), dict):
                unknown.append(_named(run))
                continue
            if not _refused(manifest["identity"], current):  # by digest, without reading what it consists of
                continue
            changed += 1
            for change in _refused(Run(run.folder).identity, current):
                by_change.setdefault(printable(told(change)), []).append(_named(run))
    return ChangedRuns(by_change=by_change, unknown=unknown, num_runs=changed)


def refuse_changed(changed: ChangedRuns, campaign: Campaign, folder: str) -> None:
    """ResumeError that names every change and its runs, unless there is none."""
    if not changed.by_change:
        return
    what = f"{changed.num_runs} of its {campaign.num_runs} runs were made with other code or data than those of now"
    why = "\n    ".join([*changed.lines, "runs of different code cannot be compared; nothing was changed"])
    fix = (
        f"take the changes back; or run all {campaign.num_runs} again with --new, which keeps these; or insist with "
        "--resume-anyway: what is done stays, the rest runs with the code and data of now, and that is recorded"
    )
    raise ResumeError(Problem(where=folder, what=what, why=why, fix=fix))


def _refused(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    return [change for change in changes_between(before, now) if change.refuses]


def _named(run: PlannedRun) -> str:
    return f"{run.name}, done" if is_done(run) else run.name


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{len(names)} run{'' if len(names) == 1 else 's'}: {'; '.join(names[:MOST_NAMES])}{more}"
