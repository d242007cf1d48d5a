"""The metric of a comparison: a field of `metrics.jsonl`, and how its curve is summarised."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.amounts import ABSENT, percent

EVAL_PREFIX = "eval_"
PASS_PREFIX = "eval_pass_at_"
PASS_MARK = "_pass_at_"  # of the held-out examples and of further sets

SET_RATE = re.compile(r"eval_(\w+)_correct_rate")


class Summary(StrEnum):
    """How a curve is summarised as one number; see `retrain.records.runs.budget`."""

    FINAL = "final"
    BEST = "best"
    AUC = "auc"


class Direction(StrEnum):
    """The better side of a metric."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Metric:
    field: str
    summary: Summary = Summary.FINAL

    def __str__(self) -> str:
        return f"{self.field}:{self.summary}"

    @property
    def is_eval(self) -> bool:
        """True if it comes from the held-out evaluation, which few steps have."""
        return self.field.startswith(EVAL_PREFIX)

    @property
    def is_rate(self) -> bool:
        return self.field.endswith("_rate") or PASS_MARK in self.field


CORRECT = Metric("correct_rate")
HELD_OUT = Metric("eval_correct_rate")
HELD_OUT_REWARD = Metric("eval_mean_reward")


def parse_metric(text: str, *, where: str) -> Metric:
    """Parse `FIELD` or `FIELD:SUMMARY`; ConfigError names the summaries."""
    field, _, summary = text.partition(":")
    known = [each.value for each in Summary]
    if not field or (summary and summary not in known):
        what = f"{text!r} is not a metric"
        fix = f"FIELD or FIELD:SUMMARY, a field of metrics.jsonl and one of {', '.join(known)}"
        raise ConfigError(Problem(where=where, what=what, fix=fix))
    return Metric(field, Summary(summary or Summary.FINAL))


def shown(value: float | None, metric: Metric) -> str:
    if value is None:
        return ABSENT
    return percent(value) if metric.is_rate else f"{value:.4g}"


def shown_difference(value: float | None, metric: Metric, *, signed: bool = True) -> str:
    """Return a difference of two values as text, of rates in percentage points (pp)."""
    if value is None:
        return ABSENT
    sign = "+" if signed else ""
    return f"{100 * value:{sign}.1f} pp" if metric.is_rate else f"{value:{sign}.4g}"


def eval_sets(fields: Iterable[str]) -> dict[str, str]:
    """Return the correct rates of further evaluation sets among `fields`, by set: `eval_NAME_correct_rate`."""
    return {found[1]: field for field in fields if (found := SET_RATE.fullmatch(field))}
