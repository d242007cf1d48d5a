"""Conditions over several evaluation sets: aggregates of each, and one family of verdicts over all sets together.

The verdict over the sets is about the mean over sets of each seed, tested over seeds like any other difference: a run
is scored on all sets, so its scores are not independent, and only the seeds repeat.

Aggregates, profiles and bootstrap intervals have the definitions of rliable: R. Agarwal et al., "Deep Reinforcement
Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264), and its package rliable 1.2.0, with which the
tests compare. `scores_NM` holds one score per run (N) and set (M), higher being better; each function takes any further
axes in front, as the bootstrap needs. rliable draws the runs of each set separately. We draw whole runs: a good seed is
often good on all sets, and drawing per set covers less. Percentile intervals of few runs cover less than they say
either way: they are shown, and no verdict rests on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.records.reading import table_of
from retrain.records.run import task_names
from retrain.records.runs.curves import EVAL_PREFIX, HELD_OUT, Metric
from retrain.records.runs.example_rates import HELD_OUT_SET
from retrain.records.runs.source import Candidate
from retrain.verdicts.stats.binomial import probability_of_improvement
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison import Comparison, Values
from retrain.verdicts.study.judge import Pairing, with_values
from retrain.verdicts.study.safeguards import Judged

OF_EVERY_SET = ("correct_rate", "mean_reward", "pass_at_")
THRESHOLDS = 101  # of a profile
# Fixed, so that a comparison is reproducible.
_STREAMS = Seeds(0)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """A number over all sets and its 95 % interval; None below two seeds."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetScores:
    """A condition over its seeds that have a number on every set.

    `mean` is over sets and seeds (Student's t over seeds); `iqm` and `gap` are the interquartile mean and the
    optimality gap with bootstrap intervals, the gap only of rates. `scores` has a row per seed, in the order of the
    sets, as has `set_means`; `profile` is the share of them above each threshold of the view.
    """

    condition: str
    seeds: tuple[int, ...]
    mean: Aggregate
    iqm: Aggregate
    gap: Aggregate | None
    scores: tuple[tuple[float, ...], ...]
    set_means: tuple[float, ...]
    profile: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsComparison:
    """A pair of conditions: the verdict on the mean over sets and one per set, and the mean chance of improvement."""

    overall: Comparison
    per_set: tuple[Comparison, ...]
    improvement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsView:
    """All conditions over the sets `names`, whose metrics are `metrics`; `thresholds` belong to the profiles.

    `tasks` names the sets that tasks of the runs hold out.
    """

    names: tuple[str, ...]
    metrics: tuple[Metric, ...]
    thresholds: tuple[float, ...]
    conditions: tuple[SetScores, ...]
    comparisons: tuple[SetsComparison, ...]
    tasks: tuple[str, ...] = ()

    @property
    def num_comparisons(self) -> int:
        return sum(1 + len(each.per_set) for each in self.comparisons)


def common_tasks(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Return the names of the `[[data.tasks]]` that all runs have."""
    found = {task_names(each.record) for each in candidates}
    return found.pop() if len(found) == 1 else ()


def set_metrics(
    candidates: Iterable[Candidate], requested: Metric | None, *, only_tasks: bool = False
) -> dict[str, Metric]:
    """Return the metric on each set that the runs were configured with, the held-out examples first.

    Several tasks hold out a set each, and their mean is not another one; `only_tasks`: no further sets.
    `requested` names the measure and summary, on whichever set: `eval_mean_reward:best`, `eval_hard_pass_at_4`; of a
    field of training it is the tasks'.
    """
    candidates = list(candidates)
    tables = (table_of(each.record, "config", "eval", "sets") for each in candidates if not only_tasks)
    tasks, sets = common_tasks(candidates), dict.fromkeys(name for table in tables for name in table)
    names = [*dict.fromkeys((*tasks, *(name for name in sets if isinstance(name, str))))]
    metric = requested or HELD_OUT
    if tasks and not metric.is_eval:
        return {name: Metric(f"task_{name}_{metric.field}", metric.summary) for name in tasks}
    measure = metric.field.removeprefix(EVAL_PREFIX)
    # A set may be called `correct`, so `correct_rate` is taken for a measure first; of two sets the longer name fits.
    is_of_a_set = not measure.startswith(OF_EVERY_SET)
    for name in sorted(names, key=len, reverse=True):
        if is_of_a_set and measure.startswith(f"{name}_"):
            measure = measure.removeprefix(f"{name}_")
            break
    fields = {} if tasks else {HELD_OUT_SET: f"{EVAL_PREFIX}{measure}"}
    fields |= {name: f"{EVAL_PREFIX}{name}_{measure}" for name in names}
    return {name: Metric(field, metric.summary) for name, field in fields.items()}


def sets_view(
    metrics: Mapping[str, Metric],
    labels: Sequence[str],
    pairings: Sequence[Pairing],
    *,
    values_of: Callable[[str, Metric], Values],
    judged: Judged,
    tasks: Sequence[str] = (),
) -> SetsView:
    """Return the view of the sets on which some run has a number; ConfigError when these are fewer than two."""
    values = {name: {label: values_of(label, metric) for label in labels} for name, metric in metrics.items()}
    values = {name: by_label for name, by_label in values.items() if any(by_label.values())}
    if len(values) < 2:
        what = f"the runs were evaluated on {', '.join(values) or 'no set'}: there is nothing to combine"
        fix = "evaluate on several sets: [eval.sets.NAME]"
        raise ConfigError(Problem(code="compare.single-set", where="--sets", what=what, fix=fix))
    found: dict[str, tuple[tuple[int, ...], Floats]] = {}
    for label in labels:
        by_set = [by_label[label] for by_label in values.values()]
        seeds = tuple(seed for seed in by_set[0] if all(seed in each for each in by_set))
        scores_NM = np.array([[each[seed] for each in by_set] for seed in seeds], dtype=np.float64)
        found[label] = seeds, scores_NM.reshape(len(seeds), len(by_set))
    is_rate = all(metrics[name].is_rate for name in values)
    scored = [scores_NM for _, scores_NM in found.values() if scores_NM.size]
    low, high = 0.0, 1.0
    if scored and not is_rate:
        low, high = min(float(each.min()) for each in scored), max(float(each.max()) for each in scored)
    thresholds_T = np.linspace(low, high, THRESHOLDS)
    return SetsView(
        names=tuple(values),
        metrics=tuple(metrics[name] for name in values),
        thresholds=tuple(thresholds_T.tolist()),
        conditions=tuple(
            _scores(label, seeds, scores_NM, thresholds_T, is_rate=is_rate)
            for label, (seeds, scores_NM) in found.items()
            if seeds
        ),
        comparisons=_comparisons(pairings, values, found, judged),
        tasks=tuple(name for name in tasks if name in values),
    )


def _scores(label: str, seeds: tuple[int, ...], scores_NM: Floats, thresholds_T: Floats, *, is_rate: bool) -> SetScores:
    means_N = scores_NM.mean(axis=1)
    interval = t_interval(means_N)
    if interval and is_rate:
        interval = max(interval[0], 0.0), min(interval[1], 1.0)
    return SetScores(
        condition=label,
        seeds=seeds,
        mean=Aggregate(value=float(means_N.mean()), interval=interval),
        iqm=_aggregate(scores_NM, interquartile_mean),
        gap=_aggregate(scores_NM, optimality_gap) if is_rate else None,
        scores=tuple(tuple(row) for row in scores_NM.tolist()),
        set_means=tuple(scores_NM.mean(axis=0).tolist()),
        profile=tuple(performance_profile(scores_NM, thresholds_T).tolist()),
    )


def _aggregate(scores_NM: Floats, statistic: Statistic) -> Aggregate:
    interval = None
    if scores_NM.shape[0] > 1:
        low, high = bootstrap(scores_NM, statistic, _STREAMS.stream("compare", "sets"))
        interval = float(low), float(high)
    return Aggregate(value=float(statistic(scores_NM)), interval=interval)


def _comparisons(
    pairings: Sequence[Pairing],
    values: Mapping[str, Mapping[str, Values]],
    found: Mapping[str, tuple[tuple[int, ...], Floats]],
    judged: Judged,
) -> tuple[SetsComparison, ...]:
    means = {
        label: dict(zip(seeds, scores_NM.mean(axis=1).tolist(), strict=True))
        for label, (seeds, scores_NM) in found.items()
    }
    columns = [means, *values.values()]
    family = [
        with_values(each, column[each.baseline], column[each.condition]) for column in columns for each in pairings
    ]
    verdicts = iter(judged(family))
    by_column = [[next(verdicts) for _ in pairings] for _ in columns]
    compared = []
    for overall, *per_set in zip(*by_column, strict=True):
        left_NM, right_KM = found[overall.baseline][1], found[overall.condition][1]
        known = bool(left_NM.size and right_KM.size)
        improvement = improvement_over_benchmarks(left_NM, right_KM) if known else None
        compared.append(SetsComparison(overall=overall, per_set=tuple(per_set), improvement=improvement))
    return tuple(compared)


TRIM_FRAC = 0.25
RESAMPLES = 2_000
Statistic = Callable[[Floats], Floats]


def interquartile_mean(scores_NM: Floats) -> Floats:
    """Return the mean of the middle half of all scores, runs and benchmarks together: a quarter is cut at either end.

    The number cut is rounded down, as in `scipy.stats.trim_mean`.
    """
    flat = np.sort(scores_NM.reshape(*scores_NM.shape[:-2], -1), axis=-1)
    cut = int(TRIM_FRAC * flat.shape[-1])
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(axis=-1))


def optimality_gap(scores_NM: Floats) -> Floats:
    """Return by how much scores fall short of 1 on average, those above counted as 1."""
    return np.asarray(1.0 - np.minimum(scores_NM, 1.0).mean(axis=(-2, -1)))


def performance_profile(scores_NM: Floats, thresholds_T: Floats) -> Floats:
    """Return the share of runs and benchmarks above each threshold, (T,): rliable's score distribution."""
    shares = [(scores_NM > threshold).mean(axis=(-2, -1)) for threshold in thresholds_T.tolist()]
    return np.stack(shares, axis=-1)


def improvement_over_benchmarks(baseline_NM: Floats, condition_KM: Floats) -> float:
    """Return P(X > Y) + P(X = Y) / 2 of a run X of the condition and Y of the baseline, averaged over benchmarks."""
    pairs = zip(baseline_NM.T, condition_KM.T, strict=True)
    return float(np.mean([probability_of_improvement(left_N, right_K) for left_N, right_K in pairs]))


def bootstrap(
    scores_NM: Floats,
    statistic: Statistic,
    stream: Generator,
    *,
    resamples: int = RESAMPLES,
    is_stratified: bool = False,
) -> tuple[Floats, Floats]:
    """Return 95 % percentile limits of a statistic over runs drawn with replacement; `is_stratified`: per benchmark.

    ValueError unless there are two runs or more of finite scores on at least one benchmark.
    """
    num_runs, num_benchmarks = scores_NM.shape
    if num_runs < 2 or not num_benchmarks or not np.isfinite(scores_NM).all():
        raise ValueError(f"finite scores of two runs or more on one benchmark or more are needed, not {scores_NM!r}")
    # One column of rows for all sets keeps the scores of a seed together.
    columns = num_benchmarks if is_stratified else 1
    rows_RNM = stream.integers(num_runs, size=(resamples, num_runs, columns))
    drawn_RNM = scores_NM[rows_RNM, np.arange(num_benchmarks)]
    low, high = np.quantile(statistic(drawn_RNM), [0.025, 0.975], axis=0)
    return np.asarray(low), np.asarray(high)
