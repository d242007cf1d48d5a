"""Finds a campaign in the ledger by its runs and its plan, and contradictions: resealed, redefined, run before.

A campaign is its conditions and seeds, whatever its folder, hypothesis or metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import hash_of, seal_of
from retrain.records.reading import Record, number, read_object, table_of, tables_in
from retrain.records.record_names import CAMPAIGN_CONTENT, CAMPAIGN_FILE, TUNING
from retrain.text.amounts import counted, first_few
from retrain.verdicts.ledger.chain import name_in
from retrain.verdicts.ledger.disk import RESTORE, Finding, RunOnDisk
from retrain.verdicts.ledger.history import History, RunHistory, Setup

Key = tuple[str, int]  # a campaign's folder in the ledger, and how many campaigns had begun there


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRecord:
    """A campaign's folder and its part of the ledger; `keys` are its folders, without an `opening` it is unknown."""

    name: str
    folder: Path
    manifest: Record
    keys: frozenset[Key]
    opening: Record | None = None
    last: Record | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.name, *(name for name, _ in self.keys)})

    def owns(self, run: RunHistory) -> bool:
        return (run.campaign, run.opening) in self.keys


def find_campaign(history: History, folder: Path, present: Sequence[RunOnDisk]) -> OnRecord:
    """Return the campaign in `folder` as the ledger knows it: by most of its runs, by name, or by its plan's hash."""
    name, manifest = name_in(history.folder, folder), read_object(folder / CAMPAIGN_FILE)
    heads = Counter((run.known.campaign, run.known.opening) for run in present if run.known and run.known.campaign)
    # Most runs decide: a few may have been copied here from another campaign.
    named = (name, len(history.openings(name)))
    likely = sorted(heads, key=lambda key: (-heads[key], key != named))
    plan = _plan_hash(manifest)
    unseen = OnRecord(name=name, folder=folder, manifest=manifest, keys=frozenset({named}))
    sealed = [
        (each, number + 1)
        for each in history.campaigns
        for number, opening in enumerate(history.openings(each))
        if plan and opening.get("plan") == plan
    ]
    for key in (*likely, named, *sealed):
        openings = history.openings(key[0])
        if 0 < key[1] <= len(openings):
            opening = openings[key[1] - 1]
            sessions = [each for each in history.campaigns[key[0]] if each["line"] >= opening["line"]]
            moved = history.campaigns.get(name, ()) if named[1] == 0 else ()
            keys = frozenset({key, named} if moved else {key})
            return replace(unseen, opening=opening, last=(*sessions, *moved)[-1], keys=keys)
    return unseen


def check_campaign(history: History, found: OnRecord, present: Sequence[RunOnDisk]) -> Iterator[Finding]:
    """Yield a plan or definition that is not the sealed one, runs of another campaign, and other campaigns like it."""
    opening, name = found.opening, found.name
    if opening is not None and found.last is not None:
        yield from _redefined(found, opening, found.last)
    yield from _tuned(history, found, present)
    for run in present:
        if opening is not None and run.known and not found.owns(run.known):
            what = f"{run.name}: it was run as {run.known.name}, not in this campaign"
            yield Finding(what=what, fix="compare it in its own campaign")
    named: set[Key] = set()
    if opening is not None:
        same = "question" if opening.get("question") else "content"  # without a plan, the same definition
        alike = (
            ((place, number), each)
            for place in history.campaigns
            for number, each in enumerate(history.openings(place), start=1)
            if each["line"] != opening["line"] and opening.get(same) and each.get(same) == opening.get(same)
        )
        for key, each in alike:
            named.add(key)
            question = "of the same plan" if opening.get("question") else "of the same conditions and seeds"
            by = ", by --new" if each.get("new") or opening.get("new") else ""
            where = "in the same folder" if key[0] == name else key[0]
            kept = "" if (history.folder / key[0]).exists() else ", and it is gone"
            what = f"{name}: a second campaign {question}{by}: {where}, opened {each.get('time')}{kept}"
            yield Finding(what=what, fix="publish both, or register another plan for the second")
    yield from _run_elsewhere(history, found, present, named)
    if found.manifest.get("plan") and opening is None and all(run.known for run in present):
        what = f"unknown: whether {name} was planned before its runs: the ledger never saw it open"
        yield Finding(what=what, fix="verify the ledger in which the campaign began", is_certain=False)


def _redefined(found: OnRecord, opening: Record, last: Record) -> Iterator[Finding]:
    name, manifest = found.name, found.manifest
    now, sealed = _plan_hash(manifest), str(opening.get("plan", ""))
    if now != sealed:
        what = f"{name}: the plan was resealed: it was {sealed[:12] or 'none'} when the campaign began, "
        fix = "restore the plan in manifest.json: `retrain compare --ledger --events --json` has the sealed one"
        yield Finding(what=what + f"and is {now[:12] or 'none'} now", fix=fix)
    contents = [str(manifest.get("sha256", ""))]
    with suppress(ConfigError):  # the file is missing or damaged
        contents.append(hash_of(read_object(found.folder / CAMPAIGN_CONTENT)))
    if any(each and each != str(last.get("content")) for each in contents):
        what = f"{name}: {CAMPAIGN_CONTENT} or manifest.json does not define the campaign that was run"
        yield Finding(what=what, fix="restore both files from a backup")
    if last.get("cells", cells_of(manifest)) != cells_of(manifest):
        what = f"{name}: manifest.json does not list the runs of the campaign that was run, or in another order"
        yield Finding(what=what, fix="restore it from a backup")


def _tuned(history: History, found: OnRecord, present: Sequence[RunOnDisk]) -> Iterator[Finding]:
    """Yield final runs on seeds that values were chosen on, and a search that is not the one on record."""
    places = {f"{name}/{TUNING}" for name in found.names}
    start = found.opening["line"] if found.opening else 0
    seeds = {run.setup[1] for run in history.runs.values() if run.campaign in places and run.line > start}
    if shared := sorted(seeds & {run.setup[1] for run in present}):
        what = f"{found.name}: seed {first_few(shared)} is of its tuning runs: values were chosen on it"
        yield Finding(what=what, fix="plan a campaign with other final seeds")
    records = (history.tunings[name] for name in found.names if name in history.tunings)
    if any(each["line"] > start and each.get("tuning") != found.manifest.get("tuning") for each in records):
        what = f"{found.name}: manifest.json does not hold the tuning that was recorded when it ended"
        yield Finding(what=what, fix="restore it from a backup")


def _run_elsewhere(
    history: History, found: OnRecord, present: Sequence[RunOnDisk], named: set[Key]
) -> Iterator[Finding]:
    """Yield the same conditions and seeds outside this campaign, earlier as a pilot or later under another plan."""
    ours = {id(run.known) for run in present}
    own = [run for run in history.runs.values() if found.owns(run)]
    outside = [run for run in history.runs.values() if not found.owns(run) and id(run) not in ours and run.setup[2]]
    setups = {run.setup for run in own} | {run.setup for run in present} if outside else set[Setup]()
    others: dict[Key, list[RunHistory]] = {}
    for run in outside:
        has_result = run.ended is None or bool(number(run.ended.get("steps")))
        if run.setup in setups and has_result:
            others.setdefault((run.campaign, run.opening), []).append(run)
    start = found.opening["line"] if found.opening else min((run.line for run in own), default=history.num_lines)
    for key, runs in others.items():
        if key in named:
            continue
        openings = history.openings(key[0])
        is_planned = 0 < key[1] <= len(openings) and bool(openings[key[1] - 1].get("plan"))
        # Earlier results may have shaped the plan. Later runs of the same seeds let one choose only if planned as well.
        is_earlier = min(run.line for run in runs) < start
        were = "already run" if is_earlier else "run again"
        seeds = sorted({run.setup[1] for run in runs}, key=lambda seed: (len(seed), seed))
        where = key[0] or first_few([run.name for run in runs])
        where = "an earlier campaign in the same folder" if where == found.name else where
        is_there = any((history.folder / (run.campaign or run.name)).exists() for run in runs)
        kept = "" if is_there else ", and it is gone"
        count = f"{counted(len(runs), 'run')} of the same conditions, begun {runs[0].started}"
        what = f"{found.name}: these seeds were {were} in {where} (seeds {first_few(seeds)}; {count}){kept}"
        fix = "plan a campaign with other seeds, or publish both"
        yield Finding(what=what, fix=fix, is_certain=is_earlier or is_planned)


def run_before(found: OnRecord, present: Sequence[RunOnDisk], unknown: Iterable[RunOnDisk]) -> Iterator[Finding]:
    """Yield runs of the same conditions and seeds older than a planned campaign but in no ledger: it was deleted."""
    setups, opened = {run.setup for run in present}, str(found.opening.get("time")) if found.opening else ""
    names = [run.name for run in unknown if run.started < opened and run.setup in setups]
    if names:
        count = counted(len(names), "run")
        what = f"{found.name}: these seeds were already run in {first_few(names)} ({count} in no ledger)"
        yield Finding(what=what, fix="plan a campaign with other seeds, or publish both")


def not_given(history: History, present: Sequence[RunOnDisk]) -> list[Finding]:
    """Return finished runs on record of the same conditions as those that were given one by one."""
    ours = {id(run.known) for run in present}
    others = [run for run in history.runs.values() if id(run) not in ours and run.state == "done"]
    given = {run.setup for run in present if others}
    alike = {(setup[0], setup[2]) for setup in given}
    left = [run.name for run in others if run.setup not in given and (run.setup[0], run.setup[2]) in alike]
    if not left:
        return []
    runs = counted(len(left), "finished run")
    what = f"{runs} of these conditions on record {'was' if len(left) == 1 else 'were'} not given: {first_few(left)}"
    return [Finding(what=what, fix="give them, too", is_certain=False)]


def _plan_hash(manifest: Mapping[str, Any]) -> str:
    return str(table_of(manifest, "plan").get("sha256", ""))


def unreadable(name: str, error: ConfigError) -> Finding:
    return Finding(what=f"{name}: {error.problems[0].what}", fix=RESTORE)


def cells_of(manifest: Mapping[str, Any]) -> str:
    """Hash the runs that a campaign's manifest lists, in order: condition, seed and folder of each."""
    runs = tables_in(manifest.get("runs"))
    return seal_of({"cells": [[each.get(name) for name in ("condition", "seed", "run_name")] for each in runs]})


def question_of(plan: Mapping[str, Any]) -> str:
    """Hash the question of a plan: hypothesis, metric, baseline and conditions, without the seeds."""
    return seal_of({name: plan.get(name) for name in ("hypothesis", "primary_metric", "baseline", "conditions")})
