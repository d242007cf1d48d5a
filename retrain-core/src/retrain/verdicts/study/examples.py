"""Differences over held-out examples: the second scope of a verdict, examples like these, and two single policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import read_records
from retrain.records.run import Run
from retrain.records.runs import example_rates
from retrain.records.runs.curves import HELD_OUT, HELD_OUT_REWARD, SECONDS, Metric
from retrain.records.runs.source import ComparedRun
from retrain.text.amounts import counted
from retrain.verdicts.stats.components import Cost, advise, components, draw_components
from retrain.verdicts.stats.crossed import crossed
from retrain.verdicts.study.comparison import Comparison, ExamplesView
from retrain.verdicts.study.factorial import Parts

EVAL_SECONDS = "eval_time_s"
# Runs of each condition whose times are read: two show a cost well enough, and reading all would double the wait.
TIMED_RUNS = 2


def with_examples(
    comparisons: Sequence[Comparison],
    runs: Sequence[ComparedRun],
    *,
    metric: Metric,
    budget: float,
    parts: Callable[[str], Parts],
) -> tuple[Comparison, ...]:
    """Return the comparisons, each with its view on examples like these, or a reason instead.

    `parts` gives the weights of a label's conditions.
    """
    try:
        reader = _Reader(runs, example_rates.per_example(metric), metric=metric, budget=budget)
    except example_rates.NoExamplesError as error:
        return tuple(replace(each, examples=ExamplesView(reason=str(error))) for each in comparisons)
    return tuple(replace(each, examples=_view(each, reader, parts)) for each in comparisons)


def two_runs(runs: Sequence[ComparedRun], *, metric: Metric, budget: float) -> TwoPolicies | None:
    """Compare two single runs over their examples; None for other numbers of runs, or without recorded examples."""
    if len(runs) != 2:
        return None
    try:
        reader = _Reader(runs, example_rates.per_example(metric), metric=metric, budget=budget)
        return two_policies([reader.rates(run.candidate.condition, run.seed) for run in runs], metric)
    except example_rates.NoExamplesError:  # the verdict's line names the reason
        return None


def _view(comparison: Comparison, reader: _Reader, parts: Callable[[str], Parts]) -> ExamplesView:
    seeds = comparison.seeds
    if len(seeds) < 2:
        return ExamplesView(reason=f"{counted(len(seeds), 'seed')} in common")
    sides = (-1.0, parts(comparison.baseline)), (1.0, parts(comparison.condition))
    weights = [(label, sign * weight) for sign, side in sides for label, weight in side.items()]
    try:
        found = [reader.rates(label, seed) for label, _ in weights for seed in seeds]
        rates_RE = example_rates.aligned(found)
    except example_rates.NoExamplesError as error:
        return ExamplesView(reason=str(error), are_others=isinstance(error, example_rates.OtherExamplesError))
    rates_CNE, clusters_E = rates_RE.reshape(len(weights), len(seeds), -1), found[0][1].clusters
    diffs_NE = np.tensordot([weight for _, weight in weights], rates_CNE, axes=1)
    level = comparison.level
    result = crossed(diffs_NE, level=level, clusters_E=clusters_E)
    squares = result.squares
    view = ExamplesView(
        num_seeds=len(seeds),
        num_examples=diffs_NE.shape[1],
        num_clusters=squares.num_clusters,
        estimate=result.mean,
        level=level,
    )
    if result.both is None:
        what = "one example, or one cluster" if squares.num_clusters < 2 else "the differences do not spread"
        return replace(view, reason=what)
    draws, both = draw_components(squares), result.both
    # Widened to those over seeds where few seeds let the exact test say less than Student's t.
    assert comparison.interval
    assert comparison.p is not None
    interval = min(comparison.interval[0], both.interval[0]), max(comparison.interval[1], both.interval[1])
    advice = None
    if interval[0] <= 0.0 <= interval[1] and result.mean:
        advice = advise(
            draws,
            difference=result.mean,
            half_width=(interval[1] - interval[0]) / 2.0,
            level=level,
            num_examples=view.num_examples,
            least_seeds=comparison.least_seeds,
            cost=reader.cost([label for label, _ in weights], seeds),
        )
    normal = crossed(diffs_NE, level=1.0 - comparison.alpha, clusters_E=clusters_E).both
    return replace(
        view,
        interval=interval,
        p=max(both.p, comparison.p),
        normal=normal.interval if normal else None,
        components=components(draws),
        advice=advice,
    )


class _Reader:
    """Reads each run's examples once, at the evaluation behind its value of the metric."""

    def __init__(
        self, runs: Sequence[ComparedRun], figure: example_rates.PerExample, *, metric: Metric, budget: float
    ) -> None:
        self._runs: Mapping[tuple[str, int], ComparedRun] = {(run.candidate.condition, run.seed): run for run in runs}
        self._figure, self._metric, self._budget = figure, metric, budget
        self._timed = cache(self._time)
        self._found: dict[tuple[str, int], tuple[str, example_rates.ExampleRates] | example_rates.NoExamplesError] = {}
        # A thousand runs share one list of ids, so it is kept once.
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def rates(self, label: str, seed: int) -> tuple[str, example_rates.ExampleRates]:
        """Return the run's name and its examples; NoExamplesError gives a reason without any."""
        if (label, seed) not in self._found:
            try:
                self._found[label, seed] = self._read(self._runs[label, seed])
            except example_rates.NoExamplesError as error:
                self._found[label, seed] = error
        found = self._found[label, seed]
        if isinstance(found, example_rates.NoExamplesError):
            raise found
        return found

    def cost(self, labels: Sequence[str], seeds: Sequence[int]) -> Cost | None:
        """Return the measured cost of more of either; None where the runs did not record their times."""
        run_s = example_s = 0.0
        for label in labels:
            times = [self._timed(label, seed) for seed in seeds[:TIMED_RUNS]]
            known = [each for each in times if each]
            if not known:
                return None
            run_s += float(np.mean([each[0] for each in known]))
            example_s += len(seeds) * float(np.mean([each[1] for each in known]))
        return Cost(seed_s=run_s, example_s=example_s) if run_s > 0.0 and example_s > 0.0 else None

    def _read(self, run: ComparedRun) -> tuple[str, example_rates.ExampleRates]:
        """Return the examples of the last evaluation of the metric within the budget, as `budget.value_at` does."""
        folder, name, curves = run.candidate.folder, run.candidate.name, run.curves
        values_R = curves.column(self._metric.field)
        rows = np.flatnonzero((run.spent.spent_R <= self._budget) & (curves.steps_R >= 0) & np.isfinite(values_R))
        if folder is None or not rows.size:
            raise example_rates.NoExamplesError(f"{name} has no evaluation")
        step, value = int(curves.steps_R[rows[-1]]), float(values_R[rows[-1]])
        rates = example_rates.read_rates(folder, self._figure, step=step, expected=value)
        ids, clusters = (self._names.setdefault(each, each) for each in (rates.ids, rates.clusters))
        return name, replace(rates, ids=ids, clusters=clusters)

    def _time(self, label: str, seed: int) -> tuple[float, float] | None:
        """Return seconds of a run up to the budget with its evaluations, and of one example in one evaluation."""
        run = self._runs[label, seed]
        if run.candidate.folder is None:
            return None
        try:
            curves = Run(run.candidate.folder).curves({SECONDS, EVAL_SECONDS})
        except ConfigError:  # read once already: it has changed since
            return None
        steps_R, evaluations_R, spent_R = curves.column(SECONDS), curves.column(EVAL_SECONDS), run.spent.spent_R
        # A running run may have written further rows since; they lie beyond any budget.
        added = max(0, steps_R.size - spent_R.size)
        within_R = np.concatenate([spent_R[: steps_R.size], np.full(added, np.inf)]) <= self._budget
        in_steps, evaluated = float(np.nansum(steps_R[within_R])), evaluations_R[within_R & np.isfinite(evaluations_R)]
        if not evaluated.size or not in_steps > 0.0:
            return None
        example_s = float(np.median(evaluated)) / self.rates(label, seed)[1].lines
        return in_steps + float(evaluated.sum()), example_s


LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPolicies:
    """Policy `second` minus `first`, paired by example: for other examples like these, and for these policies only.

    Student's t over the differences of examples, or of their clusters (Miller, arXiv:2411.00640). It is no verdict on
    the algorithms that trained them; that takes several seeds. `interval` and `p` are None without any spread.
    """

    first: str
    second: str
    metric: Metric
    difference: float
    interval: tuple[float, float] | None
    level: float
    p: float | None
    num_examples: int
    num_clusters: int


def two_policies(found: Sequence[tuple[str, example_rates.ExampleRates]], metric: Metric) -> TwoPolicies:
    """Compare two policies by name; NoExamplesError if they did not answer the same examples."""
    first_E, second_E = example_rates.aligned(found)
    (first, rates), (second, _) = found
    result = crossed((second_E - first_E)[None], level=LEVEL, clusters_E=rates.clusters)
    return TwoPolicies(
        first=first,
        second=second,
        metric=metric,
        difference=result.mean,
        interval=result.examples.interval if result.examples else None,
        level=LEVEL,
        p=result.examples.p if result.examples else None,
        num_examples=first_E.size,
        num_clusters=result.squares.num_clusters,
    )


def two_evaluations(files: Sequence[Path], metric: Metric | None) -> TwoPolicies:
    """Compare two files of `retrain eval`, of two checkpoints say; ConfigError if they cannot be compared."""
    metric = metric or HELD_OUT
    kinds = {HELD_OUT: "correct_rate", HELD_OUT_REWARD: "mean_reward"}
    if metric not in kinds:
        what, fix = f"files of `retrain eval` are not compared by {metric}", f"use {' or '.join(map(str, kinds))}"
        raise ConfigError(Problem(code="compare.metric-not-in-file", where="--metric", what=what, fix=fix))
    figure = example_rates.PerExample(name="", kind=kinds[metric], k=0)
    try:
        return two_policies([(str(file), _rates(file, figure)) for file in files], metric)
    except example_rates.NoExamplesError as error:
        what = f"the files do not share their examples: {error}"
        fix = "evaluate both checkpoints on the same examples: `retrain eval RUN --checkpoint all`"
        raise ConfigError(Problem(code="compare.other-examples", where=str(files[1]), what=what, fix=fix)) from error


def _rates(file: Path, figure: example_rates.PerExample) -> example_rates.ExampleRates:
    fix = "give two files below `evaluations` of a run"
    ids, clusters, values = [], [], []
    for number, record in read_records(file):
        if number == 1 and "example" not in record:  # the first line describes the evaluation
            continue
        try:
            ids.append(str(record["example"]))
            clusters.append(str(record.get("cluster", record["example"])))
            values.append(figure.of(record))
        except (KeyError, TypeError, ValueError) as error:
            what = f"is not an example of an evaluation: {error}"
            where = f"{file}:{number}"
            raise ConfigError(Problem(code="compare.no-evaluation", where=where, what=what, fix=fix)) from error
    if not values:
        raise ConfigError(Problem(code="compare.no-evaluation", where=str(file), what="has no example", fix=fix))
    return example_rates.ExampleRates(
        ids=tuple(ids), clusters=tuple(clusters), values_E=np.array(values), lines=len(values)
    )
