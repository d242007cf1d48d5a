"""Chooses the runs that can be compared, the budget at which their curves are cut, and the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.run import Run
from retrain.records.runs.budget import Align, Spent, along
from retrain.records.runs.curves import Curves
from retrain.records.runs.metric import CORRECT, HELD_OUT, HELD_OUT_REWARD, PASS_PREFIX, Metric, Summary
from retrain.records.runs.run_status import DONE
from retrain.records.runs.source import Candidate, Source


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
    """Return the runs that can be compared, with these fields of their metrics, and the others with the reason.

    Runs that are done count, or with a budget `at`, in units of `align`, those that reached it. ConfigError without
    any.
    """
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
        raise ConfigError(Problem(where=where, what="no run can be compared", why=why, fix=fix))
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
    """Return the requested metric (ConfigError if no run has it), by default held-out if every run has it.

    Held-out examples are the same for all runs and steps, unlike training batches, and are therefore preferred.
    """
    if requested is None:
        return HELD_OUT if all(_is_evaluated(each) for each in curves) else CORRECT
    if not any(each.has(requested.field) for each in curves):
        known = sorted({name for each in curves for name in each.values})
        near = get_close_matches(requested.field, known, n=1)
        fix = f"a field with numbers in metrics.jsonl, such as {', '.join(known)}"
        fix = f"did you mean {near[0]!r}?" if near else fix
        raise ConfigError(Problem(where=where, what=f"no run has {requested.field!r}", fix=fix))
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
    rewards_R, rates_R = curves.column(HELD_OUT_REWARD.field), curves.column(HELD_OUT.field)
    return bool((np.abs(rewards_R - rates_R) > 1e-9).any())


def _is_evaluated(curves: Curves) -> bool:
    return bool(np.isfinite(curves.column(HELD_OUT.field)[curves.steps_R >= 0]).any())
