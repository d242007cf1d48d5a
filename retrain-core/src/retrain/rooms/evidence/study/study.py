"""Reads runs, aligns them on a common budget, summarises them by condition and compares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.evidence.stats.binomial import held_out_limits, training_limits
from retrain.rooms.evidence.stats.paired import t_interval
from retrain.rooms.evidence.study.budget import COSTS, Align, Spent, along, value_at
from retrain.rooms.evidence.study.choose import chosen_metric, condition_metrics
from retrain.rooms.evidence.study.controls import controls_in, with_controls
from retrain.rooms.evidence.study.curves import read_curves
from retrain.rooms.evidence.study.equivalence import with_margin
from retrain.rooms.evidence.study.examples import with_examples
from retrain.rooms.evidence.study.family import Comparison, Pairing, judge
from retrain.rooms.evidence.study.looks import chosen_looks
from retrain.rooms.evidence.study.lost import sides_of, with_lost, with_seeds
from retrain.rooms.evidence.study.metric import CORRECT, Direction, Metric, parse_metric
from retrain.rooms.evidence.study.per_seed import Collapse, collapses
from retrain.rooms.evidence.study.registered import Analysis, Plan, departures
from retrain.rooms.evidence.study.runs import DONE, Candidate, Source, find_runs
from retrain.rooms.evidence.study.sets import SetsView, set_metrics, sets_view
from retrain.rooms.evidence.study.shopping import Shopping
from retrain.rooms.evidence.study.undeclared import undeclared, without_inputs

DEFAULT_ALPHA = 0.05
MORE_DIFFERS = "the runs differ in more than their conditions say"
EXAMPLES = Metric("eval_examples")
MOST_PROMPTS = 10**6  # per step; beyond any real number


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a comparison; None = as planned, else the default.

    `at` is a budget in units of `align`, `last` the number of steps that `final` and `best` average over; with `sets`
    all evaluation sets are compared together, too.
    """

    metric: Metric | None = None
    baseline: str | None = None
    all_pairs: bool = False
    align: Align = Align.STEPS
    at: float | None = None
    last: int | None = None
    alpha: float | None = None
    direction: Direction | None = None
    sets: bool = False


def options_of(
    *,
    metric: str | None,
    align: str,
    at: float | None,
    last: int | None,
    alpha: float | None,
    lower: bool,
    called: Callable[[str], str],
    **others: Any,
) -> Options:
    """Options from what a user gave; ConfigError names the one that cannot be, as `called(name)` calls it."""

    def refused(name: str, what: str, fix: str) -> ConfigError:
        return ConfigError(Problem(where=called(name), what=what, fix=fix))

    if align not in list(Align):
        raise refused("align", f"unknown budget {align!r}", f"use one of: {', '.join(Align)}")
    for name, value in (("at", at), ("alpha", alpha)):
        if value is not None and not math.isfinite(value):
            raise refused(name, f"{value} is not a finite number", "leave it out for the default")
    if at is not None and (at <= 0 or (align == Align.STEPS and not float(at).is_integer())):
        what = "is not positive" if at <= 0 else "is not a whole number of steps"
        raise refused("at", f"{at} {what}", "give a budget that the runs have reached")
    if alpha is not None and not 0 < alpha < 0.5:
        raise refused("alpha", f"{alpha} is not between 0 and 0.5", f"the default is {DEFAULT_ALPHA}")
    if last is not None and last < 1:
        raise refused("last", f"{last} steps are none", "give at least 1")
    return Options(
        metric=parse_metric(metric, where=called("metric")) if metric is not None else None,
        align=Align(align),
        at=at,
        last=last,
        alpha=alpha,
        direction=Direction.LOWER if lower else None,
        **others,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run included in the comparison."""

    candidate: Candidate
    seed: int
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run that is left out, and why."""

    name: str
    condition: str
    seed: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A metric of one condition: the value of each seed, their mean and its 95 % interval.

    That of a held-out share is for another seed and other examples like these, with one seed for that run on other
    examples (`stats.binomial`). That of a share of training, or of any other number, is for another seed, and None
    below two.
    """

    values: Mapping[int, float]
    mean: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition: the seeds compared, the number of requested runs, and every metric by name."""

    label: str
    seeds: tuple[int, ...]
    num_runs: int
    estimates: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The whole comparison. `exploratory` lists departures from the plan; empty if as planned.

    `budget` is where the curves are cut, `shortest` the runs that set it unless `at` was given. `undeclared` says in
    what the compared runs differ besides what their conditions say, `unknown` how many recorded no code and data.
    `num_examples` is the number of held-out examples that decide, None for metrics of training.
    `notices` and `shopping` are what the ledger knows; `looked_at` adds them.
    """

    campaign: Path | None
    metric: Metric
    direction: Direction
    alpha: float
    baseline: str
    align: Align
    budget: float
    shortest: tuple[str, ...]
    conditions: tuple[Condition, ...]
    metrics: tuple[Metric, ...]
    comparisons: tuple[Comparison, ...]
    left_out: tuple[LeftOut, ...]
    plan: Plan | None
    exploratory: tuple[str, ...]
    undeclared: tuple[str, ...]
    unknown: int
    num_examples: int | None = None
    collapses: tuple[Collapse, ...] = ()
    sets: SetsView | None = None
    notices: tuple[str, ...] = ()
    shopping: Shopping | None = None

    @property
    def standing(self) -> str:
        """`planned` or `exploratory`."""
        return "exploratory" if self.exploratory else "planned"


def compare(paths: Sequence[Path], options: Options) -> Study:
    """Compare a campaign, or run folders; ConfigError if nothing can be compared or the options are invalid.

    Nothing is recorded and no ledger is read: `looked_at` is for verdicts that somebody sees.
    """
    return study_of(find_runs(paths), options)


def study_of(source: Source, options: Options, *, earlier: Sequence[int] = ()) -> Study:
    """`compare` of runs that were found; `earlier` are the numbers of seeds of earlier looks at them."""
    plan = source.plan
    requested = options.metric or (plan.metric if plan else None)
    costs = [COSTS[options.align]] if options.align in COSTS else []
    sets = set_metrics(source.candidates, requested) if options.sets else {}
    wanted = {CORRECT.field, *costs, *(each.field for each in sets.values())}
    runs, left_out = _readable(source, options, fields=wanted | ({requested.field} if requested else set()))
    if not runs:
        raise _nothing(source, left_out)
    curves = [run.spent.curves for run in runs]
    metric = chosen_metric(requested, curves, where="--metric" if options.metric else "plan")
    direction = options.direction or (plan.direction if plan else None) or Direction.HIGHER
    alpha = options.alpha or (plan.alpha if plan else None) or DEFAULT_ALPHA
    baseline = _baseline(options, source, runs)
    budget, shortest = _budget(runs, options)
    metrics = condition_metrics(metric, curves)
    summaries = _Summaries(runs, budget=budget, last=options.last, direction=direction)
    asked_for = Counter(each.condition for each in source.candidates)
    conditions = tuple(summaries.condition(label, metrics, num_runs=asked_for[label]) for label in source.conditions)
    controls = controls_in(source)
    no_controls = [label for label in source.conditions if label not in controls or label == baseline]
    pairs = _pairs(no_controls, baseline, all_pairs=options.all_pairs)
    looks = chosen_looks(source, earlier)

    def pairing(first: str, second: str) -> Pairing:
        return looks.prepared(summaries.pairing(first, second, metric))

    pairings = [pairing(first, second) for first, second in pairs]
    margin = plan.margin if plan and metric == plan.metric else None

    def judged(family: Sequence[Pairing]) -> tuple[Comparison, ...]:
        return with_margin(judge(family, alpha=alpha, direction=direction), family, margin)

    values = {label: summaries.values(label, metric) for label in source.conditions}
    sides = sides_of(source.candidates, values, is_cut=options.at is not None)
    comparisons = with_lost(judged(pairings), pairings, sides, direction=direction, judged=judged)
    comparisons = with_controls(comparisons, controls, pairing, alpha=alpha, direction=direction)
    comparisons = looks.viewed(with_seeds(comparisons, values, direction=direction), pairings)
    study = Study(
        campaign=source.campaign,
        metric=metric,
        direction=direction,
        alpha=alpha,
        baseline=baseline,
        align=options.align,
        budget=budget,
        shortest=shortest,
        conditions=conditions,
        metrics=metrics,
        comparisons=with_examples(comparisons, runs, metric=metric, budget=budget),
        left_out=tuple(left_out),
        plan=plan,
        exploratory=(),
        undeclared=undeclared(source, [run.candidate for run in runs], baseline),
        unknown=without_inputs([run.candidate for run in runs]),
        num_examples=summaries.num_examples(source.conditions, metric),
        collapses=collapses(values, metric, direction=direction),
        sets=sets_view(
            sets,
            source.conditions,
            pairings,
            values_of=summaries.values,
            judged=partial(judge, alpha=alpha, direction=direction),
        )
        if options.sets
        else None,
    )
    return replace(study, exploratory=_departures(study, options, source))


def _departures(study: Study, options: Options, source: Source) -> tuple[str, ...]:
    made = Analysis(
        metric=study.metric,
        alpha=study.alpha,
        baseline=study.baseline,
        direction=study.direction,
        seeds={each.label: each.seeds for each in study.conditions if each.seeds},
        is_all_pairs=options.all_pairs,
        aligned_on=study.align,
        at_steps=int(study.budget) if study.align is Align.STEPS else None,
        last=options.last,
        first_start=source.first_start,
    )
    found = departures(study.plan, made)
    return (*found, MORE_DIFFERS) if study.undeclared else found


def _readable(source: Source, options: Options, *, fields: set[str]) -> tuple[list[Run], list[LeftOut]]:
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    taken: dict[tuple[str, int], str] = {}
    for each in source.candidates:
        spent, reason = _spent(each, options, fields)
        if spent and each.seed is not None:
            first = taken.setdefault((each.condition, each.seed), each.name)
            if first == each.name:
                runs.append(Run(candidate=each, seed=each.seed, spent=spent))
                continue
            reason = f"the same condition and seed as {first}"
        left_out.append(LeftOut(name=each.name, condition=each.condition, seed=each.seed, reason=reason))
    return runs, left_out


def _spent(candidate: Candidate, options: Options, fields: set[str]) -> tuple[Spent | None, str]:
    """The run's curves over the axis, or None and why not. If a budget is given, runs that reached it are included."""
    if candidate.problem:
        return None, candidate.problem
    if candidate.folder is None or (candidate.state != DONE and options.at is None):
        return None, candidate.state
    if candidate.seed is None:
        return None, "no seed is recorded"
    try:
        curves = read_curves(candidate.folder / "metrics.jsonl", fields)
    except ConfigError as error:
        problem = error.problems[0]
        return None, f"{problem.where.removeprefix(f'{candidate.folder}/')}: {problem.what}"
    if not curves.num_steps:
        return None, "no finished step"
    spent = along(curves, options.align)
    if spent is None:
        return None, f"no {options.align} are recorded"
    if options.at is not None and spent.total < options.at:
        return None, f"{candidate.state} after {spent.total:,.6g} {options.align}"
    return spent, ""


class _Summaries:
    """The value of each run for each metric, computed once."""

    def __init__(self, runs: Sequence[Run], *, budget: float, last: int | None, direction: Direction) -> None:
        self._runs: dict[str, dict[int, Spent]] = {}
        self._records: dict[str, list[Mapping[str, Any]]] = {}
        for run in runs:
            self._runs.setdefault(run.candidate.condition, {})[run.seed] = run.spent
            self._records.setdefault(run.candidate.condition, []).append(run.candidate.record)
        self._budget, self._last, self._direction = budget, last, direction

    def values(self, label: str, metric: Metric) -> dict[int, float]:
        """Values by seed, without runs that have none."""
        found = {}
        for seed, spent in self._runs.get(label, {}).items():
            value = value_at(spent, metric, budget=self._budget, last=self._last, direction=self._direction)
            if value is not None:
                found[seed] = value
        return found

    def condition(self, label: str, metrics: Sequence[Metric], *, num_runs: int) -> Condition:
        """The condition with its metrics."""
        estimates = {str(metric): self._estimate(label, metric) for metric in metrics}
        return Condition(label=label, seeds=tuple(self._runs.get(label, ())), num_runs=num_runs, estimates=estimates)

    def _estimate(self, label: str, metric: Metric) -> Estimate:
        values = self.values(label, metric)
        values_N = np.array(list(values.values()))
        if not values_N.size:
            return Estimate(values=values, mean=None, interval=None)
        examples = min(self.values(label, EXAMPLES).values(), default=0.0) if metric.is_eval else 0.0
        if not metric.is_rate or not ((values_N >= 0.0) & (values_N <= 1.0)).all():
            interval = t_interval(values_N)
        elif examples >= 1:
            interval = held_out_limits(values_N, int(examples))
        else:
            interval = training_limits(values_N, self._prompts(label))
        return Estimate(values=values, mean=float(values_N.mean()), interval=interval)

    def _prompts(self, label: str) -> int:
        """The fewest prompts per step of the condition's runs; 1 where one did not record them."""
        return min((_batch_size(record) for record in self._records.get(label, ())), default=1)

    def pairing(self, baseline: str, condition: str, metric: Metric) -> Pairing:
        """Two conditions over the seeds for which both have a number."""
        left, right = self.values(baseline, metric), self.values(condition, metric)
        seeds = tuple(seed for seed in left if seed in right)
        return Pairing(
            baseline=baseline,
            condition=condition,
            seeds=seeds,
            baseline_N=np.array([left[seed] for seed in seeds]),
            condition_N=np.array([right[seed] for seed in seeds]),
        )

    def num_examples(self, labels: Sequence[str], metric: Metric) -> int | None:
        """The held-out examples behind a metric, if all runs have as many; None for others."""
        if not metric.is_eval:
            return None
        counts = {count for label in labels for count in self.values(label, EXAMPLES).values()}
        return int(counts.pop()) if len(counts) == 1 else None


def _batch_size(record: Mapping[str, Any]) -> int:
    config = record.get("config")
    training = config.get("training") if isinstance(config, Mapping) else None
    size = training.get("batch_size") if isinstance(training, Mapping) else None
    return size if isinstance(size, int) and 1 <= size <= MOST_PROMPTS else 1


def _budget(runs: Sequence[Run], options: Options) -> tuple[float, tuple[str, ...]]:
    """Where the curves are cut, and the runs that end there while others go on."""
    if options.at is not None:
        return options.at, ()
    budget = min(run.spent.total for run in runs)
    shortest = tuple(run.candidate.name for run in runs if run.spent.total == budget)
    return budget, shortest if len(shortest) < len(runs) else ()


def _baseline(options: Options, source: Source, runs: Sequence[Run]) -> str:
    """The requested baseline, the planned one, or the first condition with a compared run."""
    present = {run.candidate.condition for run in runs}
    first = next(label for label in source.conditions if label in present)
    baseline = options.baseline or (source.plan.baseline if source.plan else "") or first
    if baseline not in source.conditions:
        where = "--baseline" if options.baseline else "plan"
        fix = f"one of: {', '.join(source.conditions)}"
        raise ConfigError(Problem(where=where, what=f"{baseline!r} is not a condition here", fix=fix))
    return baseline


def _pairs(labels: Sequence[str], baseline: str, *, all_pairs: bool) -> list[tuple[str, str]]:
    if all_pairs:
        return list(combinations(labels, 2))
    return [(baseline, label) for label in labels if label != baseline]


def _nothing(source: Source, left_out: Sequence[LeftOut]) -> ConfigError:
    counts = Counter(each.reason for each in left_out)
    why = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(5)) or "there are no runs"
    where = str(source.campaign) if source.campaign else ", ".join(each.name for each in source.candidates[:3])
    fix = "wait until runs are done, or compare unfinished ones: --at STEPS"
    return ConfigError(Problem(where=where, what="no run can be compared", why=why, fix=fix))
