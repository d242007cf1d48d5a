"""Which of the runs that were found can be compared, and up to which budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.run import Run
from retrain.records.runs.budget import Align, Spent, along
from retrain.records.runs.curves import Curves
from retrain.records.runs.run_status import DONE
from retrain.records.runs.source import Candidate, Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRun:
    """A run included in the comparison."""

    candidate: Candidate
    seed: int
    spent: Spent

    @property
    def curves(self) -> Curves:
        """Its metrics."""
        return self.spent.curves


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run that is left out, and why."""

    name: str
    condition: str
    seed: int | None
    reason: str


def readable_runs(
    source: Source, fields: set[str], *, align: Align, at: float | None
) -> tuple[list[ComparedRun], list[LeftOut]]:
    """The runs that can be compared, with these fields of their metrics, and the others with the reason.

    Runs that are done count, or with a budget `at`, in units of `align`, those that reached it. ConfigError when none
    does.
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
        raise _nothing(source, left_out)
    return runs, left_out


def common_budget(runs: Sequence[ComparedRun], at: float | None) -> tuple[float, tuple[str, ...]]:
    """Where the curves are cut, at `at` or where the shortest run ends, and the runs that end there before others."""
    if at is not None:
        return at, ()
    budget = min(run.spent.total for run in runs)
    shortest = tuple(run.candidate.name for run in runs if run.spent.total == budget)
    return budget, shortest if len(shortest) < len(runs) else ()


def _spent(candidate: Candidate, fields: set[str], *, align: Align, at: float | None) -> tuple[Spent | None, str]:
    """The run's curves over the axis, or None and why not. If a budget is given, runs that reached it are included."""
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


def _nothing(source: Source, left_out: Sequence[LeftOut]) -> ConfigError:
    counts = Counter(each.reason for each in left_out)
    why = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(5)) or "there are no runs"
    where = str(source.campaign) if source.campaign else ", ".join(each.name for each in source.candidates[:3])
    fix = "wait until runs are done, or compare unfinished ones: --at STEPS"
    return ConfigError(Problem(where=where, what="no run can be compared", why=why, fix=fix))
