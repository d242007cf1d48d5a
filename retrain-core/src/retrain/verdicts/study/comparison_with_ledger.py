"""Compares runs with the ledger's record of them, and records the look and its verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import seal_of
from retrain.records.record_names import METRICS
from retrain.records.runs.source import Candidate, Source, find_runs
from retrain.verdicts.ledger import campaigns, disk
from retrain.verdicts.ledger.chain import NAME, append, ledger_folder, name_in
from retrain.verdicts.ledger.history import History, RunHistory, read_history
from retrain.verdicts.ledger.looks import LOOK, UNRECORDED, VERDICT, Looks, is_on_record, looks_in
from retrain.verdicts.study.study import Options, Study, study_of

LEVELS_ABOVE = 3
CONTRADICTED = "the ledger contradicts the plan or the records"
UNKNOWN = "unknown"  # a notice that begins so is no accusation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ledger:
    """A ledger, the runs it may know and its record of the compared campaign; `is_own` unless it is further up."""

    history: History
    present: Sequence[disk.RunOnDisk]
    campaign: campaigns.OnRecord | None
    problem: disk.Finding | None
    is_own: bool

    def looks(self, *, data: str = "") -> Looks:
        """Return the looks on record at the campaign, at any of the runs, or at records with this hash."""
        known = [each.known for each in self.present if each.known]
        runs = {each.name for each in self.present} | {each.name for each in known}
        names = self.campaign.names if self.campaign else {each.campaign for each in known if each.campaign}
        return looks_in(self.history, campaigns=names, runs=runs, data=data)


def comparison_with_ledger(paths: Sequence[Path], options: Options, *, is_recorded: bool = True) -> Study:
    """Compare with the findings of the ledger; record the look and its verdicts, once for the same data.

    A ledger that cannot be read or written changes no verdict, but leaves a planned study unverified.
    """
    source = find_runs(paths)
    notices: list[str] = []
    ledgers: list[_Ledger] = []
    by_ledger: dict[Path, list[Candidate]] = {ledger_folder(source.campaign): []} if source.campaign else {}
    for candidate in source.candidates:
        if found := source.campaign or candidate.folder:
            by_ledger.setdefault(ledger_folder(found), []).append(candidate)
    for folder, candidates in by_ledger.items():
        present = [disk.read_run(folder, each.folder) for each in candidates if each.folder]
        # Runs may have been moved down from a folder with another ledger.
        for place in (folder, *(each for each in folder.parents[:LEVELS_ABOVE] if (each / NAME).is_file())):
            try:
                ledgers.append(_opened(read_history(place), source, present, is_own=place == folder))
            except ConfigError as error:
                notices.append(f"{UNKNOWN}, the ledger {error.problems[0].where} {error.problems[0].what}")
    # Of the looks on record those that gave a choice, as none by `status` in a finished campaign.
    is_as_begun = bool(source.campaign) and not source.added_seeds and all(each.has_ended for each in source.candidates)
    earlier = [look for each in ledgers for look in each.looks().looks if not (look.by and is_as_begun)]
    study = study_of(source, options, earlier=[look.num_seeds for look in earlier])
    findings = [found for each in ledgers for found in _findings(each) if found.is_certain or each.is_own]
    notices += [found.what for found in findings]
    has_left_plan = any(found.is_certain for found in findings)
    exploratory = (*study.exploratory, CONTRADICTED) if has_left_plan else study.exploratory
    is_unverified = any(each.startswith(UNKNOWN) for each in notices)
    study = replace(study, exploratory=exploratory, is_unverified=is_unverified)
    looks = Looks()
    for each in ledgers:
        if each.is_own:
            looks, reason = _recorded(each, study, options, source, is_recorded=is_recorded)
            notices += [UNRECORDED.format(reason)] if reason else []
    looks = replace(looks, registered_in=source.plan.registered_in if source.plan else "")
    return replace(study, notices=tuple(dict.fromkeys(notices)), looks=looks)


def _opened(history: History, source: Source, runs: Sequence[disk.RunOnDisk], *, is_own: bool) -> _Ledger:
    present = disk.in_ledger(history, runs)
    campaign, problem = None, None
    if source.campaign:
        try:
            campaign = campaigns.find_campaign(history, source.campaign, present)
        except ConfigError as error:
            problem = campaigns.unreadable(name_in(history.folder, source.campaign), error)
    return _Ledger(history=history, present=present, campaign=campaign, problem=problem, is_own=is_own)


def _findings(ledger: _Ledger) -> list[disk.Finding]:
    """Return disagreements of the ledger and the disk about these runs and their campaign."""
    history, present, campaign = ledger.history, ledger.present, ledger.campaign
    fix = "`retrain compare --ledger` says more"
    found = [disk.Finding(what=f"{history.file}: {fault}", fix=fix) for fault in history.faults[:1]]
    found += [ledger.problem] if ledger.problem else []
    alike = {each.setup for each in present}
    names = {each.name for each in present}

    def in_scope(run: RunHistory) -> bool:
        return campaign.owns(run) if campaign else run.name in names and run.setup in alike

    elsewhere = disk.Elsewhere(history.folder)
    if campaign:
        found += campaigns.check_campaign(history, campaign, present)
    else:
        found += campaigns.not_given(history, present)
    if campaign and campaign.manifest.get("plan"):
        found += campaigns.run_before(campaign, present, elsewhere.unknown(history, campaign.folder))
    found += disk.gone(history, present, in_scope, elsewhere)
    found += disk.changed(history, present) + disk.copied(history, present)
    return found + disk.unseen(history, present, campaign.opening if campaign else None)


def _recorded(
    ledger: _Ledger, study: Study, options: Options, source: Source, *, is_recorded: bool
) -> tuple[Looks, str]:
    """Return all looks including this one, and the reason it could not be recorded."""
    history, present = ledger.history, ledger.present
    name = name_in(history.folder, source.campaign) if source.campaign else ""
    scope: dict[str, Any] = {"campaign": name} if name else {"runs": sorted(each.name for each in present)}
    left_out = {each.name for each in study.left_out}
    compared = {each.folder.resolve() for each in source.candidates if each.folder and each.name not in left_out}
    kept = [[*run.identity[1:], run.hashes.get(METRICS)] for run in present if run.folder.resolve() in compared]
    data = seal_of({"runs": sorted(kept, key=str)})  # the records that were compared
    chosen: dict[str, Any] = {"metric": str(study.metric), "direction": study.direction.value, "alpha": study.alpha}
    chosen |= {"baseline": study.baseline, "align": study.align.value, "at": options.at, "last": options.last}
    look = {
        **scope,
        **chosen,
        "all_pairs": options.all_pairs,
        "seeds": {each.label: list(each.seeds) for each in study.conditions if each.seeds},
        "data": data,
    }
    reason = ""
    if not is_on_record(history.looks, look):
        reason = append(history.folder, LOOK, **look) if is_recorded else ""
        # Counted even if it could not be written: this look was taken.
        history.looks.append(look)
    names = ("condition", "baseline", "difference", "interval", "p_holm")
    verdicts = [{n: getattr(each, n) for n in names} | {"verdict": each.verdict.value} for each in study.comparisons]
    verdict = {**scope, "look": seal_of(look), "standing": study.standing, "comparisons": verdicts}
    if is_recorded and study.comparisons and not is_on_record(history.verdicts, verdict):
        reason = append(history.folder, VERDICT, **verdict) or reason
    return ledger.looks(data=data), reason
