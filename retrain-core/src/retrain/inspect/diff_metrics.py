"""Compares the metrics of two runs step by step, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from retrain.records.reading import TIMED, Record, number
from retrain.records.run import Run

T = TypeVar("T")
FINAL = ("loss", "correct_rate", "mean_reward")
HELD_OUT = ("eval_correct_rate", "eval_mean_reward")
TIMES = ("step_time_s", "eval_time_s", "sft_time_s")
# These fields are settings, compared as such; only results can diverge.
LABELS = frozenset({"step", "algorithm_mode", "advantage_mode", "transform_mode", "uncertainty_kind", "condition"})
_ABSENT = object()


@dataclass(slots=True)
class Curve:
    """Results of one run: numbers of its last step, its correct rates, its time in steps and evaluations."""

    steps: int = 0
    last_step: int = -1
    wall_time_s: float = 0.0
    rates: list[float] = field(default_factory=list)
    final: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys((*FINAL, *HELD_OUT)))
    names: set[str] = field(default_factory=set)

    def add(self, step: int, metrics: Record) -> None:
        """Add the next line; a negative step is the evaluation before training, or one of a warm-up."""
        self.wall_time_s += sum(number(metrics.get(name)) or 0.0 for name in TIMES)
        self.final |= {name: value for name in HELD_OUT if (value := number(metrics.get(name))) is not None}
        if step < 0:
            return
        self.steps += 1
        self.last_step = step
        self.final |= {name: number(metrics.get(name)) for name in FINAL}
        if (rate := number(metrics.get("correct_rate"))) is not None:
            self.rates.append(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDiff:
    """Where two runs diverge: the first common step at which a common field differs, and those fields.

    `only_a` and `only_b` are fields that the other run never has; timing (`*_time_s`) and settings are left out.
    """

    curve_a: Curve
    curve_b: Curve
    common_steps: int
    diverging_step: int | None
    fields: Mapping[str, Mapping[str, Any]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """The same steps with the same results."""
        both = self.curve_a.steps == self.curve_b.steps == self.common_steps > 0
        return both and self.diverging_step is None

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "common_steps": self.common_steps,
            "first_diverging_step": self.diverging_step,
            "fields": self.fields,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare_metrics(run_a: Run, run_b: Run) -> MetricsDiff:
    """Compare the metrics of two runs line by line."""
    curve_a, curve_b = Curve(), Curve()
    common, diverging, fields = 0, None, {}
    for step, a, b in side_by_side(run_a.steps(required=True), run_b.steps(required=True)):
        for curve, metrics in ((curve_a, a), (curve_b, b)):
            if metrics is not None:
                curve.add(step, metrics)
        if a is None or b is None:
            continue
        common += step >= 0
        results_a, results_b = _results(a), _results(b)
        curve_a.names.update(results_a)
        curve_b.names.update(results_b)
        if diverging is None and (fields := _differing(results_a, results_b)):
            diverging = step
    return MetricsDiff(
        curve_a=curve_a,
        curve_b=curve_b,
        common_steps=common,
        diverging_step=diverging,
        fields=fields,
        only_a=tuple(sorted(curve_a.names - curve_b.names)),
        only_b=tuple(sorted(curve_b.names - curve_a.names)),
    )


def side_by_side(a: Iterator[tuple[int, T]], b: Iterator[tuple[int, T]]) -> Iterator[tuple[int, T | None, T | None]]:
    """Merge two streams in order of steps: each step once, None where a side lacks it."""
    next_a, next_b = next(a, None), next(b, None)
    while next_a or next_b:
        step = min(entry[0] for entry in (next_a, next_b) if entry)
        value_a = next_a[1] if next_a and next_a[0] == step else None
        value_b = next_b[1] if next_b and next_b[0] == step else None
        yield step, value_a, value_b
        next_a = next(a, None) if value_a is not None else next_a
        next_b = next(b, None) if value_b is not None else next_b


def _results(metrics: Record) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in LABELS and not name.endswith(TIMED)}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"a": value, "b": b[name]} for name, value in a.items() if b.get(name, _ABSENT) not in (_ABSENT, value)
    }
