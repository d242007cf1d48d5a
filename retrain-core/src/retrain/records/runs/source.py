"""Finds the runs to compare, in a campaign or individual folders, and chooses runs, budget and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import Record, integers_in, read_if_any, read_object, table_of, tables_in, text, time_of
from retrain.records.record_names import CAMPAIGN_CONTENT, CAMPAIGN_FILE
from retrain.records.run import Run, compared_settings, control_of_record, is_run
from retrain.records.runs.campaign_status import read_campaign
from retrain.records.runs.curves import (
    CORRECT,
    HELD_OUT,
    HELD_OUT_REWARD,
    PASS_PREFIX,
    Align,
    Curves,
    Metric,
    Spent,
    Summary,
    along,
)
from retrain.records.runs.registered import Plan, read_plan
from retrain.records.runs.run_status import DONE, status_of_run
from retrain.records.runs.tuning import ConditionTuning, read_tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A run by its condition and seed; `folder` is None before it has one, `problem` says why it cannot be used."""

    name: str
    condition: str
    seed: int | None
    folder: Path | None
    state: str
    started: datetime | None = None
    problem: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    has_ended: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The requested campaign with its plan, or runs (then `campaign` is None).

    `declared` are the values of each condition in `campaign.json`. `added_seeds` are those by which the campaign grew.
    `factors` has the level of each condition of a factorial, by factor; `tuning` the conditions that were tuned.
    Runs that its planned looks saved are no candidates.
    """

    campaign: Path | None
    conditions: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    plan: Plan | None
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    added_seeds: tuple[int, ...] = ()
    factors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tuning: Mapping[str, ConditionTuning] = field(default_factory=dict)

    def tuned_values(self, run: Candidate) -> Mapping[str, Any]:
        """Return the values that were chosen for a run; a control has those of its condition."""
        control = control_of_record(run.record)
        own = self.tuning.get(run.condition.removesuffix(f"+{control}") if control else run.condition)
        return own.values_of(run.seed) if own else {}

    @property
    def first_start(self) -> datetime | None:
        return min((each.started for each in self.candidates if each.started), default=None)


def find_runs(paths: Sequence[Path]) -> Source:
    """Return the runs of one campaign folder, or of several run folders; ConfigError for anything else."""
    campaigns = [path for path in paths if (path / CAMPAIGN_FILE).is_file() and not is_run(path)]
    if campaigns and len(paths) > 1:
        what = "a campaign cannot be combined with other folders"
        fix = "give one campaign, or the folders of its runs: CAMPAIGN/runs/*"
        raise ConfigError(Problem(code="compare.campaign-with-runs", where=str(campaigns[0]), what=what, fix=fix))
    if campaigns:
        return _campaign(campaigns[0])
    for path in paths:
        if not is_run(path):
            what = "is neither a campaign (manifest.json) nor a run (run.json)" if path.is_dir() else "no such folder"
            fix = "give a campaign's folder, or folders of runs; `retrain status` lists them"
            raise ConfigError(Problem(code="compare.no-such-run", where=str(path), what=what, fix=fix))
    names = {path.resolve(): str(path) for path in reversed(paths)}
    records = {path.resolve(): Run(path.resolve()).record for path in paths}
    labels = _labels(records)
    candidates = []
    for folder, record in records.items():
        status, seed = status_of_run(folder), record.get("seed")
        candidates.append(
            Candidate(
                name=names[folder],
                condition=labels[folder],
                seed=seed if type(seed) is int else None,
                folder=folder,
                state=status.state,
                started=time_of(record.get("started")),
                problem=status.error if status.state == "unreadable" else "",
                record=record,
            )
        )
    conditions = tuple(dict.fromkeys(each.condition for each in candidates))
    # The anytime test depends on the order of seeds: it must not be chosen on the command line.
    candidates.sort(key=_began)
    tuning = {run.condition: tuned for run in reversed(candidates) if run.folder and (tuned := _tuning_of(run.folder))}
    return Source(campaign=None, conditions=conditions, candidates=tuple(candidates), plan=None, tuning=tuning)


def _campaign(folder: Path) -> Source:
    manifest = read_object(folder / CAMPAIGN_FILE)
    status = read_campaign(folder)
    if status is None:
        what, fix = "is not the manifest of a campaign", "give a campaign's folder"
        raise ConfigError(Problem(code="campaign.no-manifest", where=str(folder / CAMPAIGN_FILE), what=what, fix=fix))
    candidates = []
    for run in status.runs:
        if not run.is_needed:
            continue
        state = run.status.state if run.status else ("failed" if run.has_failed else "not started")
        record = Run(run.status.path).record if run.status else {}
        problem = run.status.error if run.status and state == "unreadable" else ""
        # Seeds pair the runs: under a wrong one a run would be compared with the wrong partner.
        if record and record.get("seed") != run.seed:
            problem = problem or f"manifest.json says seed {run.seed}, run.json seed {record.get('seed')}"
        candidates.append(
            Candidate(
                name=run.name,
                condition=run.condition,
                seed=run.seed,
                folder=run.status.path if run.status else None,
                state=state,
                started=time_of(record.get("started")),
                problem=problem,
                record=record,
                has_ended=run.has_ended,
            )
        )
    grown = tables_in(manifest.get("grown"))
    # Without them, runs of one condition are compared with each other.
    content = read_if_any(folder / CAMPAIGN_CONTENT)
    declared, factors = table_of(content, "conditions"), table_of(content, "factors")
    return Source(
        campaign=folder,
        conditions=status.conditions,
        candidates=tuple(candidates),
        plan=read_plan(manifest),
        declared={label: values for label, values in declared.items() if isinstance(values, dict)},
        tuning=read_tuning(manifest),
        added_seeds=tuple(dict.fromkeys(seed for each in grown for seed in integers_in(each.get("seeds")))),
        factors={name: levels for name, levels in factors.items() if isinstance(levels, dict)},
    )


def _tuning_of(run: Path) -> ConditionTuning | None:
    """Return the tuning of a single run's condition, from the campaign that it lies in."""
    manifest = read_if_any(run.parent.parent / CAMPAIGN_FILE)
    labels = [
        text(each.get("condition")) for each in tables_in(manifest.get("runs")) if each.get("run_name") == run.name
    ]
    return read_tuning(manifest).get(labels[0]) if labels else None


def _began(run: Candidate) -> tuple[bool, float, int, str, str]:
    """Sort key: the time a run began; runs of one second by seed, condition and content."""
    time_s = run.started.timestamp() if run.started else 0.0
    return run.started is None, time_s, run.seed if run.seed is not None else -1, run.condition, str(run.folder)


def _labels(records: Mapping[Path, Record]) -> dict[Path, str]:
    """Return the labels of individual runs: the condition, and the settings in which runs of that condition differ."""
    settings = {folder: dict(compared_settings(record)) for folder, record in records.items()}
    names = {folder: text(record.get("condition")) or "(no condition)" for folder, record in records.items()}
    differing: dict[str, list[str]] = {}
    for name in set(names.values()):
        alike = [settings[folder] for folder in records if names[folder] == name]
        keys = sorted({key for each in alike for key in each})
        differing[name] = [key for key in keys if any(each.get(key) != alike[0].get(key) for each in alike)]
    labels = {}
    for folder, name in names.items():
        parts = [f"{key}={settings[folder].get(key, 'absent')}" for key in differing[name]]
        labels[folder] = f"{name}~{','.join(parts)}" if parts else name
    return labels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRun:
    candidate: Candidate
    seed: int
    spent: Spent

    @property
    def curves(self) -> Curves:
        return self.spent.curves


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    name: str
    condition: str
    seed: int | None
    reason: str


def readable_runs(
    source: Source, fields: set[str], *, align: Align, at: float | None
) -> tuple[list[ComparedRun], list[LeftOut]]:
    """Return the runs that are done, or reached the budget `at`, with their metrics, and the others with the reason."""
    runs: list[ComparedRun] = []
    left_out: list[LeftOut] = []
    taken: dict[tuple[str, int], str] = {}
    for each in source.candidates:
        spent, reason = _spent(each, fields, align=align, at=at)
        if spent and each.seed is not None:
            first = taken.setdefault((each.condition, each.seed), each.name)
            if first == each.name:
                runs.append(ComparedRun(candidate=each, seed=each.seed, spent=spent))
                continue
            reason = f"the same condition and seed as {first}"
        left_out.append(LeftOut(name=each.name, condition=each.condition, seed=each.seed, reason=reason))
    if not runs:
        counts = Counter(each.reason for each in left_out)
        why = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(5)) or "there are no runs"
        where = str(source.campaign) if source.campaign else ", ".join(each.name for each in source.candidates[:3])
        fix = "wait until runs are done, or compare unfinished ones: --at STEPS"
        raise ConfigError(
            Problem(code="compare.no-run-ready", where=where, what="no run can be compared", why=why, fix=fix)
        )
    return runs, left_out


def common_budget(runs: Sequence[ComparedRun], at: float | None) -> tuple[float, tuple[str, ...]]:
    """Return where the curves are cut, at `at` or where the shortest run ends, and the runs that end there."""
    if at is not None:
        return at, ()
    budget = min(run.spent.total for run in runs)
    shortest = tuple(run.candidate.name for run in runs if run.spent.total == budget)
    return budget, shortest if len(shortest) < len(runs) else ()


def _spent(candidate: Candidate, fields: set[str], *, align: Align, at: float | None) -> tuple[Spent | None, str]:
    if candidate.problem:
        return None, candidate.problem
    if candidate.folder is None or (candidate.state != DONE and at is None):
        return None, candidate.state
    if candidate.seed is None:
        return None, "no seed is recorded"
    try:
        curves = Run(candidate.folder).curves(fields)
    except ConfigError as error:
        problem = error.problems[0]
        return None, f"{problem.where.removeprefix(f'{candidate.folder}/')}: {problem.what}"
    if not curves.num_steps:
        return None, "no finished step"
    spent = along(curves, align)
    if spent is None:
        return None, f"no {align} are recorded"
    if at is not None and spent.total < at:
        return None, f"{candidate.state} after {spent.total:,.6g} {align}"
    return spent, ""


def chosen_metric(requested: Metric | None, curves: Sequence[Curves], *, where: str) -> Metric:
    """Return the requested metric, by default held-out if every run has it: its examples are the same for all."""
    if requested is None:
        return HELD_OUT if all(_is_evaluated(each) for each in curves) else CORRECT
    if not any(each.has(requested.field) for each in curves):
        known = sorted({name for each in curves for name in each.values})
        near = get_close_matches(requested.field, known, n=1)
        others = f"a field with numbers in metrics.jsonl, such as {', '.join(known)}"
        what, fix = f"no run has {requested.field!r}", f"did you mean {near[0]!r}?" if near else others
        raise ConfigError(Problem(code="compare.unknown-metric", where=where, what=what, fix=fix))
    return requested


def condition_metrics(metric: Metric, curves: Sequence[Curves]) -> tuple[Metric, ...]:
    """Return the metrics of each condition: final, best and area of both rates, pass@k at the end.

    The held-out mean reward is among them unless it equals the held-out rate everywhere, as with scores of 0 and 1.
    pass@1 always equals that rate and is left out. The deciding metric is always included.
    """
    fields = [CORRECT.field, *([HELD_OUT.field] if any(_is_evaluated(each) for each in curves) else [])]
    shown = [Metric(field, summary) for field in fields for summary in Summary]
    shown += [HELD_OUT_REWARD] if any(_is_graded(each) for each in curves) else []
    names = {name for each in curves for name in each.values if name.startswith(PASS_PREFIX)}
    sizes = sorted(int(size) for name in names if (size := name.removeprefix(PASS_PREFIX)).isdigit())
    shown += [Metric(f"{PASS_PREFIX}{size}") for size in sizes if size > 1]
    return tuple(dict.fromkeys((*shown, metric)))


def _is_graded(curves: Curves) -> bool:
    # Means of zeros and ones are added up in another order for a reward than for a rate.
    rewards_R, rates_R = curves.column(HELD_OUT_REWARD.field), curves.column(HELD_OUT.field)
    return bool((np.abs(rewards_R - rates_R) > 1e-9).any())


def _is_evaluated(curves: Curves) -> bool:
    return bool(np.isfinite(curves.column(HELD_OUT.field)[curves.steps_R >= 0]).any())
