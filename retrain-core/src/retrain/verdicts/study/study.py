"""Reads runs, aligns them on a common budget, summarises them by condition and compares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import table_of
from retrain.records.run import Control
from retrain.records.runs import source as sources
from retrain.records.runs.curves import CORRECT, COSTS, Align, Direction, Metric, Spent, parse_metric, value_at
from retrain.records.runs.registered import Plan
from retrain.records.runs.undeclared import other_examples, undeclared
from retrain.verdicts.ledger.looks import Looks as RecordedLooks
from retrain.verdicts.stats.binomial import held_out_limits, training_limits
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison import Collapse, Comparison, collapses
from retrain.verdicts.study.examples import TwoPolicies, two_runs, with_examples
from retrain.verdicts.study.factorial import Factorial, factorial_of, mixed
from retrain.verdicts.study.judge import Pairing, judge, with_few_seeds, with_margin, with_values
from retrain.verdicts.study.looks import Looks, chosen_looks
from retrain.verdicts.study.safeguards import controls_in, lost_seeds, with_controls, with_lost, with_seeds
from retrain.verdicts.study.sensitivity import RateByRate, Sensitivity, rate_by_rate, sensitivities
from retrain.verdicts.study.sets import SetsView, common_tasks, set_metrics, sets_view
from retrain.verdicts.study.tuning import TuningView, on_final_seeds, tuning_view

DEFAULT_ALPHA = 0.05
NO_PLAN = "no plan was registered before the runs ([campaign.plan])"
MORE_DIFFERS = "the runs differ in more than their conditions say"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a comparison; None = as planned, otherwise the default.

    `at` is a budget in units of `align`, `last` the number of steps that `final` and `best` average over.
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
    """Return options from a user's values; ConfigError names a bad one, as `called(name)` calls it."""
    is_whole = align != Align.STEPS or at is None or float(at).is_integer()
    for name, value, is_good, allowed in (
        ("align", align, align in list(Align), f"one of: {', '.join(Align)}"),
        ("at", at, at is None or (0 < at < math.inf and is_whole), f"a finite, positive (whole) number of {align}"),
        ("alpha", alpha, alpha is None or 0 < alpha < 0.5, "a number between 0 and 0.5"),
        ("last", last, last is None or last >= 1, "a number of steps, at least 1"),
    ):
        if not is_good:
            what, fix = f"{value} is not {allowed}", "give such a value, or leave it out"
            raise ConfigError(Problem(code="compare.bad-option", where=called(name), what=what, fix=fix))
    return Options(
        metric=parse_metric(metric, where=called("metric")) if metric is not None else None,
        align=Align(align),
        at=at,
        last=last,
        alpha=alpha,
        direction=Direction.LOWER if lower else None,
        **others,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The whole comparison. `exploratory` lists departures from the plan; empty if as planned.

    `budget` is where the curves are cut, `shortest` the runs that set it unless `at` was given. `undeclared` are
    differences of the runs that their conditions do not name, `unknown` counts runs that recorded no code and data.
    `num_examples` held-out examples decide, None for metrics of training; `other_examples` names runs that had other
    ones than the first. `samplers` are listed if they differ and the metric is one of training, whose prompts they
    chose. `comparison_with_ledger` adds `notices` and `looks` from the ledger, and `is_unverified` if it lacks a run or
    the plan. `values` are of the deciding metric, by condition or mixture of a factorial, and by seed.
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
    left_out: tuple[sources.LeftOut, ...]
    plan: Plan | None
    exploratory: tuple[str, ...]
    undeclared: tuple[str, ...]
    unknown: int
    num_examples: int | None = None
    other_examples: tuple[str, ...] = ()
    collapses: tuple[Collapse, ...] = ()
    sets: SetsView | None = None
    two_runs: TwoPolicies | None = None
    samplers: tuple[str, ...] = ()
    tuning: TuningView | None = None
    notices: tuple[str, ...] = ()
    looks: RecordedLooks | None = None
    is_unverified: bool = False
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    sensitivity: tuple[Sensitivity, ...] = ()
    rate_by_rate: tuple[RateByRate, ...] = ()

    @property
    def standing(self) -> str:
        """`planned`, `planned, unverified` (no ledger shows that it was) or `exploratory`."""
        if self.exploratory:
            return "exploratory"
        return "planned, unverified" if self.is_unverified else "planned"


def study_of(source: sources.Source, options: Options, *, earlier: Sequence[int] = ()) -> Study:
    """Compare runs that were found; `earlier` are the numbers of seeds of earlier looks at them."""
    plan = source.plan
    requested = options.metric or (plan.metric if plan else None)
    costs = [COSTS[options.align]] if options.align in COSTS else []
    tasks = common_tasks(source.candidates)
    sets = set_metrics(source.candidates, requested, only_tasks=not options.sets) if options.sets or tasks else {}
    wanted = {CORRECT, *sets.values(), *([requested] if requested else [])}
    fields = {*costs, *(each.field for each in wanted)}
    runs, left_out = sources.readable_runs(source, fields, align=options.align, at=options.at)
    metric = sources.chosen_metric(
        requested, [run.curves for run in runs], where="--metric" if options.metric else "plan"
    )
    budget, shortest = sources.common_budget(runs, options.at)
    baseline, looks = _baseline(options, source, runs), chosen_looks(source, earlier)
    factorial = Factorial() if options.all_pairs else factorial_of(source.factors, baseline)
    judging = _Judging(
        source=source,
        options=options,
        metric=metric,
        direction=options.direction or (plan.direction if plan else None) or Direction.HIGHER,
        alpha=options.alpha or (plan.alpha if plan else None) or DEFAULT_ALPHA,
        baseline=baseline,
        looks=replace(looks, ended=looks.ended | factorial.ended(looks.ended)),
        controls=controls_in(source),
        factorial=factorial,
    )
    summaries = Summaries(runs, budget=budget, last=options.last, direction=judging.direction, factorial=factorial)
    metrics = sources.condition_metrics(metric, [run.curves for run in runs])
    num_runs = Counter(each.condition for each in source.candidates)
    values = {label: summaries.values(label, metric) for label in source.conditions}
    pairings = judging.pairings(summaries, factorial)
    judged = partial(judge, alpha=judging.alpha, direction=judging.direction)
    pairs = judging.pairings(summaries, Factorial())
    of_sets = partial(sets_view, sets, source.conditions, pairs, values_of=summaries.values, judged=judged, tasks=tasks)
    recorded = [each for each in sets.values() if any(summaries.values(label, each) for label in source.conditions)]
    comparisons = judging.comparisons(pairings, summaries, values)
    scopes = with_examples(comparisons, runs, metric=metric, budget=budget, parts=factorial.parts)
    comparisons = with_few_seeds(scopes)
    compared = [run.candidate for run in runs]
    others = _other_examples(comparisons, compared, metric)
    curves = sensitivities(source.declared, values, direction=judging.direction)
    study = Study(
        campaign=source.campaign,
        metric=metric,
        direction=judging.direction,
        alpha=judging.alpha,
        baseline=judging.baseline,
        align=options.align,
        budget=budget,
        shortest=shortest,
        conditions=tuple(summaries.condition(each, metrics, num_runs=num_runs[each]) for each in source.conditions),
        metrics=metrics,
        comparisons=comparisons,
        left_out=tuple(left_out),
        plan=plan,
        exploratory=(),
        undeclared=undeclared(source, compared, judging.baseline),
        unknown=sum(not isinstance(each.record.get("identity"), dict) for each in compared),
        num_examples=None if others else summaries.num_examples(source.conditions, metric),
        other_examples=others,
        collapses=collapses(values, metric, direction=judging.direction),
        # Sets on request, and tasks wherever they were evaluated.
        sets=of_sets() if options.sets or len(recorded) > 1 else None,
        samplers=_samplers(compared, metric),
        values=factorial.with_mixtures(values),
        sensitivity=curves,
        rate_by_rate=judging.rate_by_rate(curves, summaries),
        tuning=tuning_view(source, comparisons, judging.direction, judging.controls),
        two_runs=None if source.campaign else two_runs(runs, metric=metric, budget=budget),
    )
    return replace(study, exploratory=_departures(study, options, source))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judging:
    """The judging of one study's conditions: as planned, unless the options say otherwise."""

    source: sources.Source
    options: Options
    metric: Metric
    direction: Direction
    alpha: float
    baseline: str
    looks: Looks
    controls: Mapping[str, tuple[str, Control]]
    factorial: Factorial

    def pairings(self, summaries: Summaries, factorial: Factorial) -> list[Pairing]:
        """Pair the baseline with every condition, all pairs, or a factorial's; a control only with its condition."""
        if factorial.effects:
            return [self._pairing(summaries, each.baseline, each.condition) for each in factorial.effects]
        labels = [label for label in self.source.conditions if label not in self.controls or label == self.baseline]
        pairs = combinations(labels, 2) if self.options.all_pairs else product([self.baseline], labels)
        return [self._pairing(summaries, first, second) for first, second in pairs if first != second]

    def rate_by_rate(self, curves: Sequence[Sensitivity], summaries: Summaries) -> tuple[RateByRate, ...]:
        of_pair, own = partial(self._pairing, summaries), [each for each in curves if each.label not in self.controls]
        return rate_by_rate(own, self.baseline, of_pair, alpha=self.alpha, direction=self.direction)

    def comparisons(
        self, pairings: Sequence[Pairing], summaries: Summaries, values: Mapping[str, Mapping[int, float]]
    ) -> tuple[Comparison, ...]:
        """Return the verdicts, weakened by lost runs and controls, with the looks taken."""
        lost = lost_seeds(self.source.candidates, values, is_cut=self.options.at is not None)
        found = self._judged(pairings)
        found = with_lost(
            found, pairings, values, lost, direction=self.direction, judged=self._judged, factorial=self.factorial
        )
        of_pair = partial(self._pairing, summaries)
        found = with_controls(found, self.controls, of_pair, alpha=self.alpha, direction=self.direction)
        found = with_seeds(found, self.factorial.with_mixtures(values), direction=self.direction)
        if self.factorial.effects:
            found = tuple(replace(each, effect=e) for each, e in zip(found, self.factorial.effects, strict=True))
        return tuple(self.looks.view(each, pairing) for each, pairing in zip(found, pairings, strict=True))

    def _pairing(self, summaries: Summaries, first: str, second: str) -> Pairing:
        return self.looks.prepared(summaries.pairing(first, second, self.metric))

    def _judged(self, family: Sequence[Pairing]) -> tuple[Comparison, ...]:
        plan = self.source.plan
        margin = plan.margin if plan and self.metric == plan.metric else None
        return with_margin(judge(family, alpha=self.alpha, direction=self.direction), family, margin)


def _departures(study: Study, options: Options, source: sources.Source) -> tuple[str, ...]:
    """Return reasons why a comparison is exploratory, as sentences; empty if it is as planned."""
    found = [NO_PLAN]
    if plan := study.plan:
        found = [*_of_the_plan(plan, study, source), *_of_the_analysis(plan, study, options)]
    return (*found, *on_final_seeds(source), *study.other_examples, *([MORE_DIFFERS] if study.undeclared else []))


def _of_the_plan(plan: Plan, study: Study, source: sources.Source) -> Iterator[str]:
    """Yield departures in the plan itself and in its conditions and seeds."""
    if not plan.is_intact:
        yield "the plan's hash does not match its text: it was changed after it was registered"
    if plan.written is None or source.first_start is None:
        yield "nothing shows that the plan was written before the first step"
    elif plan.written.replace(microsecond=0) > source.first_start:  # `run.json` stores whole seconds
        times = (each.isoformat(" ", "seconds") for each in (plan.written, source.first_start))
        yield "the plan was written {}, after the first run began ({})".format(*times)
    compared = {each.label: each.seeds for each in study.conditions if each.seeds}
    for condition, seeds in compared.items():
        if condition not in plan.conditions:
            yield f"{condition} was not planned"
            continue
        due = plan.due(seeds)
        if missing := set(due) - set(seeds):
            planned = f"planned seeds of its {len(due)}-seed look" if len(due) < len(plan.seeds) else "planned seeds"
            yield f"{condition} lacks {len(missing)} of the {len(due)} {planned}"
        if more := set(seeds) - set(plan.seeds):
            yield f"{condition} has {len(more)} seeds that were not planned"
    yield from (f"{label} was planned and is missing" for label in plan.conditions if label not in compared)


def _of_the_analysis(plan: Plan, study: Study, options: Options) -> Iterator[str]:
    for name, planned, actual in (
        ("metric", plan.metric, study.metric),
        ("alpha", plan.alpha, study.alpha),
        ("baseline", plan.baseline, study.baseline),
        ("better side", plan.direction, study.direction),
    ):
        if planned != actual:
            yield f"the {name} is {actual}, planned was {planned if planned else 'none'}"
    if options.all_pairs:
        yield "all pairs are compared, planned was the baseline with each of the others"
    if study.align is not Align.STEPS:
        yield f"aligned on {study.align}, planned was on steps"
    elif int(study.budget) != plan.max_steps:
        yield f"looked at after {int(study.budget)} steps, planned was after {plan.max_steps}"
    if options.last is not None:
        yield f"final is taken over the last {options.last} steps, planned was a tenth of them"


def _other_examples(
    comparisons: Sequence[Comparison], runs: Sequence[sources.Candidate], metric: Metric
) -> tuple[str, ...]:
    """Return differences in examples by the ids in `eval.jsonl` where all runs have them, and by the settings."""
    views = [each.examples for each in comparisons if each.examples]
    are_alike = bool(views) and all(view.num_examples for view in views)
    found = other_examples(runs, metric, are_ids_alike=are_alike)
    return found or tuple(f"other held-out examples: {view.reason}" for view in views if view.are_others)[:1]


def _samplers(runs: Sequence[sources.Candidate], metric: Metric) -> tuple[str, ...]:
    """Return the samplers of the runs where they differ and chose the prompts behind the metric."""
    if metric.is_eval:
        return ()
    data = (table_of(run.record, "config", "data") for run in runs)
    found = {str(keys["sampler"]) for keys in data if "sampler" in keys}
    return tuple(sorted(found)) if len(found) > 1 else ()


def _baseline(options: Options, source: sources.Source, runs: Sequence[sources.ComparedRun]) -> str:
    """Return the requested baseline, the planned one, or the first condition with a compared run."""
    present = {run.candidate.condition for run in runs}
    first = next(label for label in source.conditions if label in present)
    baseline = options.baseline or (source.plan.baseline if source.plan else "") or first
    if baseline not in source.conditions:
        where, fix = "--baseline" if options.baseline else "plan", f"use one of: {', '.join(source.conditions)}"
        what = f"{baseline!r} is not a condition here"
        raise ConfigError(Problem(code="compare.unknown-baseline", where=where, what=what, fix=fix))
    return baseline


# Each condition's metrics over its seeds, and pairs of conditions.


EXAMPLES = Metric("eval_examples")
# Per step, beyond any real number: a damaged record must not make limits look exact.
MOST_PROMPTS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A metric of one condition: the value of each seed, their mean and its 95 % interval.

    A held-out share's interval is for another seed and other examples like these; any other for another seed.
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


class Summaries:
    """The value of each run for each metric, computed once."""

    def __init__(
        self,
        runs: Sequence[sources.ComparedRun],
        *,
        budget: float,
        last: int | None,
        direction: Direction,
        factorial: Factorial,
    ) -> None:
        self._runs: dict[str, dict[int, Spent]] = {}
        self._records: dict[str, list[Mapping[str, Any]]] = {}
        for run in runs:
            self._runs.setdefault(run.candidate.condition, {})[run.seed] = run.spent
            self._records.setdefault(run.candidate.condition, []).append(run.candidate.record)
        self._budget, self._last, self._direction, self._factorial = budget, last, direction, factorial
        self._values: dict[tuple[str, Metric], dict[int, float]] = {}

    def values(self, label: str, metric: Metric) -> Mapping[int, float]:
        if parts := self._factorial.mixtures.get(label):
            return mixed(parts, {each: self.values(each, metric) for each in parts})
        if (label, metric) not in self._values:
            found = self._values[label, metric] = {}
            for seed, spent in self._runs.get(label, {}).items():
                value = value_at(spent, metric, budget=self._budget, last=self._last, direction=self._direction)
                if value is not None:
                    found[seed] = value
        return self._values[label, metric]

    def condition(self, label: str, metrics: Sequence[Metric], *, num_runs: int) -> Condition:
        estimates = {str(metric): self._estimate(label, metric) for metric in metrics}
        return Condition(label=label, seeds=tuple(self._runs.get(label, ())), num_runs=num_runs, estimates=estimates)

    def _estimate(self, label: str, metric: Metric) -> Estimate:
        values = self.values(label, metric)
        values_N = np.array(list(values.values()))
        if not values_N.size:
            return Estimate(values=values, mean=None, interval=None)
        examples = min(self.values(label, EXAMPLES).values(), default=0.0) if metric.is_eval else 0.0
        # A field may only be named like a rate.
        if not metric.is_rate or not ((values_N >= 0.0) & (values_N <= 1.0)).all():
            interval = t_interval(values_N)
        elif examples >= 1:
            interval = held_out_limits(values_N, int(examples))
        else:
            prompts = min(map(_batch_size, self._records.get(label, ())), default=1)
            interval = training_limits(values_N, prompts)
        return Estimate(values=values, mean=float(values_N.mean()), interval=interval)

    def pairing(self, baseline: str, condition: str, metric: Metric) -> Pairing:
        none_N = np.zeros(0)
        pair = Pairing(baseline=baseline, condition=condition, seeds=(), baseline_N=none_N, condition_N=none_N)
        return with_values(pair, self.values(baseline, metric), self.values(condition, metric))

    def num_examples(self, labels: Sequence[str], metric: Metric) -> int | None:
        """Return the number of held-out examples behind a metric, if it is the same in all runs; None otherwise."""
        if not metric.is_eval:
            return None
        counts = {count for label in labels for count in self.values(label, EXAMPLES).values()}
        return int(counts.pop()) if len(counts) == 1 else None


def _batch_size(record: Mapping[str, Any]) -> int:
    """Return the prompts per step; 1 where the run did not record them."""
    size = table_of(record, "config", "training").get("batch_size")
    return size if isinstance(size, int) and 1 <= size <= MOST_PROMPTS else 1
