"""How the compared conditions were tuned: budget, gain from it, and values at the edge of their range."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.curves import Direction, Metric, parse_metric
from retrain.records.runs.source import Source
from retrain.records.runs.tuning import ConditionTuning
from retrain.verdicts.stats.best_of import Interval, best_intervals, difference_of_best, expected_best
from retrain.verdicts.study.comparison import Comparison, Verdict

NOT_TUNED = "not at all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedCondition:
    """The expected best of `sizes` configurations, `curve` with `intervals`; `edges` are sentences."""

    condition: str
    budget: str
    num_tried: int
    num_failed: int
    tokens: int
    sizes: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()
    intervals: tuple[Interval, ...] = ()
    edges: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBudget:
    """Two conditions with `size` configurations each, by the values of the tuning runs."""

    baseline: str
    condition: str
    size: int
    difference: float
    interval: Interval
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningView:
    """All conditions, the untuned ones without a curve. `is_per_seed`: each final seed had its own choice."""

    metric: Metric
    conditions: tuple[TunedCondition, ...]
    at_equal_budget: tuple[EqualBudget, ...]
    is_per_seed: bool
    on_final_seeds: tuple[str, ...] = ()

    def unequal(self, *labels: str) -> str:
        """Return a sentence if these conditions, or any, had different budgets."""
        chosen = [each for each in self.conditions if not labels or each.condition in labels]
        if len({each.budget for each in chosen}) < 2:
            return ""
        by_budget: dict[str, list[str]] = {}
        for each in chosen:
            by_budget.setdefault(each.budget, []).append(each.condition)
        parts = (f"{', '.join(names)} {budget}" for budget, names in by_budget.items())
        return f"Not tuned alike: {'; '.join(parts)}"


def tuning_view(
    source: Source, comparisons: Sequence[Comparison], direction: Direction, controls: Collection[str]
) -> TuningView | None:
    """Return the view; None if no condition was tuned."""
    if not source.tuning:
        return None
    metric = parse_metric(next(iter(source.tuning.values())).metric or "?", where="tuning")
    labels = [label for label in source.conditions if label not in controls]
    known = {label: each for label, each in source.tuning.items() if label in labels}
    values = {label: _values(each, direction) for label, each in known.items()}
    return TuningView(
        metric=metric,
        conditions=tuple(_condition(label, known.get(label), direction) for label in labels),
        at_equal_budget=tuple(_at_equal_budget(comparisons, values, direction)),
        is_per_seed=all(each.is_per_seed for each in known.values()),
        on_final_seeds=tuple(_on_final_seeds(source)),
    )


def _values(tuning: ConditionTuning, direction: Direction) -> Floats:
    """Return the values of all configurations, larger being better; a failed one counts as the worst."""
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    known = [sign * each.value for each in tuning.tried if each.value is not None]
    worst = [min(known)] * (len(tuning.tried) - len(known)) if known else []
    return np.array([*known, *worst])


def _condition(label: str, tuning: ConditionTuning | None, direction: Direction) -> TunedCondition:
    if tuning is None:
        return TunedCondition(condition=label, budget=NOT_TUNED, num_tried=0, num_failed=0, tokens=0)
    values_N, sign = _values(tuning, direction), 1.0 if direction is Direction.HIGHER else -1.0
    doubled = takewhile(lambda size: size < values_N.size, (2**power for power in count()))
    sizes = [*doubled, values_N.size] if values_N.size else []
    return TunedCondition(
        condition=label,
        budget=f"with {tuning.budget:,} {tuning.unit}",
        num_tried=len(tuning.tried),
        num_failed=sum(each.value is None for each in tuning.tried),
        tokens=tuning.tokens,
        sizes=tuple(sizes),
        curve=tuple((sign * expected_best(values_N, sizes)).tolist()) if sizes else (),
        intervals=tuple(_turned(each, sign) for each in best_intervals(values_N, sizes)) if sizes else (),
        edges=tuple(_edges(label, tuning, sign)),
    )


def _turned(interval: Interval, sign: float) -> Interval:
    low, high = sorted(sign * end for end in interval)
    return low, high


def _edges(label: str, tuning: ConditionTuning, sign: float) -> Iterator[str]:
    """Yield a sentence per key whose best value is the largest or smallest that was tried."""
    known = [each for each in tuning.tried if each.value is not None]
    best = max(known, key=lambda each: sign * (each.value or 0.0), default=None)
    for path in tuning.keys if best else ():
        tried = [each.values.get(path) for each in tuning.tried]
        numbers = [each for each in tried if isinstance(each, int | float) and not isinstance(each, bool)]
        value = best.values.get(path) if best else None
        if len(numbers) < len(tried) or len({*numbers}) < 2 or value not in (min(numbers), max(numbers)):
            continue
        end = "largest" if value == max(numbers) else "smallest"
        yield f"{label}: its best {path}, {value:.3g}, is the {end} tried ({tuning.keys[path]}): widen the range"


def _at_equal_budget(
    comparisons: Iterable[Comparison], values: dict[str, Floats], direction: Direction
) -> Iterator[EqualBudget]:
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    for each in comparisons:
        first_N, second_N = (values.get(label, np.zeros(0)) for label in (each.baseline, each.condition))
        if not (size := min(first_N.size, second_N.size)):
            continue
        difference, (low, high) = difference_of_best(first_N, second_N, size)
        verdict = Verdict.BETTER if low > 0.0 else Verdict.WORSE if high < 0.0 else Verdict.CANNOT_TELL
        yield EqualBudget(
            baseline=each.baseline,
            condition=each.condition,
            size=size,
            difference=sign * difference,
            interval=_turned((low, high), sign),
            verdict=verdict,
        )


def _on_final_seeds(source: Source) -> Iterator[str]:
    """Yield departures from any plan: final runs on the seeds that the values were chosen on."""
    tuned_on = {seed for each in source.tuning.values() for seed in each.seeds}
    for label in source.conditions:
        shared = sorted({each.seed for each in source.candidates if each.condition == label and each.seed in tuned_on})
        if shared:
            yield f"{label} has final runs on tuning seed {', '.join(map(str, shared))}: its values were chosen on it"
