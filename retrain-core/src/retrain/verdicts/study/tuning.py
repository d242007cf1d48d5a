"""How the compared conditions were tuned: budget, gain from it, and values at the edge of their range."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.curves import Direction, Metric, parse_metric
from retrain.records.runs.source import Source
from retrain.records.runs.tuning import ConditionTuning, Values
from retrain.verdicts.stats.best_of import Blocks, Interval, best_intervals, exchange_p, expected_best
from retrain.verdicts.stats.flip import at_most
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.judge import holm


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedCondition:
    """`curve` is the expected best, with its interval, by number of configurations; `edges` are sentences."""

    condition: str
    budget: str = "not at all"
    num_tried: int = 0
    num_failed: int = 0
    curve: Mapping[int, tuple[float, Interval]] = field(default_factory=dict)
    edges: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBudget:
    """Two conditions with `size` configurations each, by the values of the tuning runs; `p` is corrected (Holm)."""

    baseline: str
    condition: str
    size: int
    difference: float
    p: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningView:
    """All conditions, the untuned ones without a curve. `is_per_seed`: each final seed had its own choice."""

    metric: Metric
    conditions: tuple[TunedCondition, ...]
    at_equal_budget: tuple[EqualBudget, ...]
    is_per_seed: bool

    def unequal(self, *labels: str) -> str:
        """Return a sentence if these conditions, by default all, had different budgets."""
        by_budget: dict[str, list[str]] = {}
        for each in self.conditions:
            if not labels or each.condition in labels:
                by_budget.setdefault(each.budget, []).append(each.condition)
        parts = (f"{', '.join(names)} {budget}" for budget, names in by_budget.items())
        return f"Not tuned alike: {'; '.join(parts)}" if len(by_budget) > 1 else ""


def tuning_view(
    source: Source, comparisons: Sequence[Comparison], direction: Direction, controls: Collection[str]
) -> TuningView | None:
    """Return the view; None if no condition was tuned."""
    labels = [label for label in source.conditions if label not in controls]
    known = {label: source.tuning[label] for label in labels if label in source.tuning}
    if not known:
        return None
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    return TuningView(
        metric=parse_metric(next(iter(known.values())).metric or "?", where="tuning"),
        conditions=tuple(_condition(label, known.get(label), sign) for label in labels),
        at_equal_budget=tuple(_at_equal_budget(comparisons, known, sign)),
        is_per_seed=all(each.is_per_seed for each in known.values()),
    )


def _values(tuning: ConditionTuning, sign: float) -> Floats:
    """Return the values of all configurations, larger being better; a failed one counts as the worst."""
    worst = min((sign * value for _, value in tuning.tried if value is not None), default=0.0)
    return np.array([worst if value is None else sign * value for _, value in tuning.tried] or [worst])


def _condition(label: str, tuning: ConditionTuning | None, sign: float) -> TunedCondition:
    if tuning is None:
        return TunedCondition(condition=label)
    values_N = _values(tuning, sign)
    sizes = [*takewhile(lambda size: size < values_N.size, (2**power for power in count())), values_N.size]
    means, intervals = (sign * expected_best(values_N, sizes)).tolist(), best_intervals(values_N, sizes)
    curve = {size: (mean, _turned(each, sign)) for size, mean, each in zip(sizes, means, intervals, strict=True)}
    return TunedCondition(
        condition=label,
        budget=tuning.budget,
        num_tried=len(tuning.tried),
        num_failed=sum(value is None for _, value in tuning.tried),
        curve=curve,
        edges=tuple(_edges(label, tuning, sign)),
    )


def _turned(interval: Interval, sign: float) -> Interval:
    return interval if sign > 0 else (-interval[1], -interval[0])


def _edges(label: str, tuning: ConditionTuning, sign: float) -> Iterator[str]:
    """Yield a sentence per key whose best value is the largest or smallest that was tried."""
    known = [(sign * value, values) for values, value in tuning.tried if value is not None]
    best: Values = max(known, key=lambda pair: pair[0])[1] if known else {}
    for path, tried in tuning.keys.items():
        given: list[Any] = [values.get(path) for values, _ in tuning.tried]
        numbers = [each for each in given if type(each) in (int, float)]
        value = best.get(path)
        if len({*numbers}) > 1 and value in (min(numbers), max(numbers)):
            end = "largest" if value == max(numbers) else "smallest"
            yield f"{label}: its best {path}, {value:.3g}, is the {end} tried ({tried}): widen the range"


def _at_equal_budget(
    comparisons: Sequence[Comparison], known: Mapping[str, ConditionTuning], sign: float
) -> Iterator[EqualBudget]:
    blocks = {label: _blocks(each, sign) for label, each in known.items() if each.tried}
    pairs = [each for each in comparisons if {each.baseline, each.condition} <= blocks.keys()]
    sizes = [min(len(known[label].tried) for label in (each.baseline, each.condition)) for each in pairs]
    found = [exchange_p(blocks[e.baseline], blocks[e.condition], size) for e, size in zip(pairs, sizes, strict=True)]
    corrected = holm([p for _, p in found])
    for each, size, (difference, _), p in zip(pairs, sizes, found, corrected, strict=True):
        side = Verdict.BETTER if difference > 0.0 else Verdict.WORSE
        yield EqualBudget(
            baseline=each.baseline,
            condition=each.condition,
            size=size,
            difference=sign * difference,
            p=p,
            verdict=side if at_most(p, each.alpha) else Verdict.CANNOT_TELL,
        )


def _blocks(tuning: ConditionTuning, sign: float) -> Blocks:
    values_N, labels = _values(tuning, sign), np.array(tuning.blocks)
    return {label: values_N[labels == label].tolist() for label in tuning.blocks}


def on_final_seeds(source: Source) -> Iterator[str]:
    """Yield departures from a plan: final runs on the seeds that their values were chosen on."""
    tuned_on = {seed for each in source.tuning.values() for seed in each.seeds}
    for label in source.conditions:
        shared = sorted({each.seed for each in source.candidates if each.condition == label and each.seed in tuned_on})
        if shared:
            yield f"{label} has final runs on tuning seed {', '.join(map(str, shared))}: its values were chosen on it"
