"""Looks at a study: what the ledger knows about its runs, and the look and its verdicts put on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.rooms.evidence.ledger import disk
from retrain.rooms.evidence.ledger.chain import append
from retrain.rooms.evidence.ledger.history import History, RunHistory, read_history
from retrain.rooms.evidence.ledger.looks import LOOK, VERDICT, Looks, is_on_record, looks_in
from retrain.rooms.evidence.ledger.place import RUNS, ledger_folder, name_in
from retrain.rooms.evidence.runs.source import Candidate, Source, find_runs
from retrain.rooms.evidence.study.shopping import Shopping
from retrain.rooms.evidence.study.study import Options, Study, study_of
from retrain.rooms.session.records.seal import seal_of

CONTRADICTED = "the ledger names what does not fit the plan or the records"
UNRECORDED = "this look is not on record: {}"


def looked_at(paths: Sequence[Path], options: Options) -> Study:
    """`compare`, with what the ledger knows; the look and its verdicts are recorded, once for the same data.

    A ledger that cannot be read or written changes no verdict: that is told among the notices.
    """
    source = find_runs(paths)
    notices: list[str] = []
    ledgers: list[tuple[History, list[Candidate]]] = []
    for folder, candidates in _by_ledger(source).items():
        try:
            ledgers.append((read_history(folder), candidates))
        except ConfigError as error:
            notices.append(f"unknown, the ledger {error.problems[0].where} {error.problems[0].what}")
    study = study_of(source, options, earlier=_seeds_of_looks_before(source, ledgers))
    has_left_plan, looks = False, Looks()
    for history, candidates in ledgers:
        folder = history.folder
        present = [disk.read_run(folder, each.folder) for each in candidates if each.folder]
        findings = _findings(history, source, present)
        has_left_plan |= any(each.is_certain for each in findings)
        notices += [each.what for each in findings]
        scope = _scope(folder, source, present)
        looks, reason = _recorded(history, study, options, scope, _data(study, source, present))
        notices += [UNRECORDED.format(reason)] if reason else []
    exploratory = (*study.exploratory, CONTRADICTED) if has_left_plan else study.exploratory
    shopping = Shopping(looks=looks, registered_in=_registered_in(source))
    return replace(study, notices=tuple(dict.fromkeys(notices)), exploratory=exploratory, shopping=shopping)


def _seeds_of_looks_before(source: Source, ledgers: Sequence[tuple[History, Sequence[Candidate]]]) -> list[int]:
    """How many seeds each look on record at this campaign, or at any of these runs, has seen."""
    found: list[int] = []
    for history, candidates in ledgers:
        names = [name_in(history.folder, each.folder) for each in candidates if each.folder]
        campaign = name_in(history.folder, source.campaign) if source.campaign else ""
        found += [each.num_seeds for each in looks_in(history, campaign=campaign, runs=names).looks]
    return found


def _by_ledger(source: Source) -> dict[Path, list[Candidate]]:
    if source.campaign:
        return {ledger_folder(source.campaign): list(source.candidates)}
    found: dict[Path, list[Candidate]] = {}
    for each in source.candidates:
        if each.folder:
            found.setdefault(ledger_folder(each.folder), []).append(each)
    return found


def _findings(history: History, source: Source, present: Sequence[disk.RunOnDisk]) -> list[disk.Finding]:
    """What the ledger and the disk disagree on, about these runs and their campaign."""
    found = [
        disk.Finding(what=f"{history.file}: {fault}", fix="`retrain ledger verify` says more")
        for fault in history.faults[:1]
    ]
    campaign = name_in(history.folder, source.campaign) if source.campaign else ""
    if source.campaign:
        found += disk.of_campaign(history, campaign, source.campaign)
    alike = {(*each.identity[1:], each.hashes.get("settings")) for each in present}
    names = {each.name for each in present}
    opening = history.num_openings(campaign)

    def in_scope(run: RunHistory) -> bool:
        if campaign:
            return run.name.startswith(f"{campaign}/{RUNS}/") and run.opening == opening
        first = run.first
        settings = run.settings
        return run.name in names and (str(first.get("condition")), str(first.get("seed")), settings) in alike

    found += disk.gone(history, present, in_scope, disk.Elsewhere(history.folder))
    found += disk.changed(history, present) + disk.copied(history, present)
    return found + disk.unseen(history, present, campaign)


def _scope(folder: Path, source: Source, present: Sequence[disk.RunOnDisk]) -> dict[str, Any]:
    """By what a look is found again: its campaign, or the names of its runs."""
    if source.campaign:
        return {"campaign": name_in(folder, source.campaign)}
    return {"runs": sorted(each.name for each in present)}


def _data(study: Study, source: Source, present: Sequence[disk.RunOnDisk]) -> str:
    """Hash of the records that were compared."""
    left_out = {each.name for each in study.left_out}
    compared = {str(each.folder.resolve()) for each in source.candidates if each.folder and each.name not in left_out}
    hashes = [[*run.identity[1:], run.hashes.get(disk.METRICS)] for run in present]
    kept = [each for run, each in zip(present, hashes, strict=True) if str(run.folder.resolve()) in compared]
    return seal_of({"runs": sorted(kept, key=str)})


def _recorded(
    history: History, study: Study, options: Options, scope: Mapping[str, Any], data: str
) -> tuple[Looks, str]:
    """All looks including this one, and why it could not be recorded."""
    look = {
        **scope,
        "metric": str(study.metric),
        "direction": study.direction.value,
        "alpha": study.alpha,
        "baseline": study.baseline,
        "align": study.align.value,
        "at": options.at,
        "last": options.last,
        "all_pairs": options.all_pairs,
        "seeds": {each.label: list(each.seeds) for each in study.conditions if each.seeds},
        "data": data,
    }
    reason = ""
    if not is_on_record(history.looks, look):
        reason = append(history.folder, LOOK, **look)
        history.looks.append(look)
    verdict = {**scope, "look": seal_of(look), "standing": study.standing, "comparisons": _verdicts(study)}
    if study.comparisons and not is_on_record(history.verdicts, verdict):
        reason = append(history.folder, VERDICT, **verdict) or reason
    return looks_in(history, campaign=scope.get("campaign", ""), runs=scope.get("runs", ()), data=data), reason


def _verdicts(study: Study) -> list[dict[str, Any]]:
    return [
        {
            "condition": each.condition,
            "baseline": each.baseline,
            "difference": each.difference,
            "interval": each.interval,
            "p_holm": each.p_holm,
            "verdict": each.verdict.value,
        }
        for each in study.comparisons
    ]


def _registered_in(source: Source) -> str:
    return source.plan.registered_in if source.plan else ""
