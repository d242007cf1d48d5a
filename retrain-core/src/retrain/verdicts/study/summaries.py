"""Each condition's metrics over its seeds, and pairs of conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.records.reading import table_of
from retrain.records.runs.curves import Direction, Metric, Spent, value_at
from retrain.records.runs.source import ComparedRun
from retrain.verdicts.stats.binomial import held_out_limits, training_limits
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.judge import Pairing, with_values

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

    def __init__(self, runs: Sequence[ComparedRun], *, budget: float, last: int | None, direction: Direction) -> None:
        self._runs: dict[str, dict[int, Spent]] = {}
        self._records: dict[str, list[Mapping[str, Any]]] = {}
        for run in runs:
            self._runs.setdefault(run.candidate.condition, {})[run.seed] = run.spent
            self._records.setdefault(run.candidate.condition, []).append(run.candidate.record)
        self._budget, self._last, self._direction = budget, last, direction
        self._values: dict[tuple[str, Metric], dict[int, float]] = {}

    def values(self, label: str, metric: Metric) -> Mapping[int, float]:
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
