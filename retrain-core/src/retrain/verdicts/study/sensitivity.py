"""Sensitivity to the learning rate: the curve over conditions that differ in nothing else, and its width.

The width is the factor between the rates at which the curve of means, straight lines over log(rate), falls below 90 %
of its highest point. The highest of several means is a little too high by chance, so widths err on the narrow side.

Single rates are one family of verdicts. "Better at each rate" needs no correction: if it is false at one rate, the p of
this one is at most alpha in at most alpha of campaigns (R. L. Berger, Technometrics 24:295, 1982).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from retrain.records.runs.curves import Direction, Metric, shown, shown_difference
from retrain.verdicts.stats.flip import at_most
from retrain.verdicts.study.comparison import Comparison, Values, Verdict
from retrain.verdicts.study.judge import Pairing, judge

KEPT_FRAC = 0.9
FEWEST_RATES = 3
LR = "training.lr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """From `low` to `high` a curve keeps 90 % of its best, at `best`; an open end lies beyond the rates tried."""

    best: float
    low: float
    high: float
    is_low_open: bool
    is_high_open: bool

    @property
    def factor(self) -> float:
        return self.high / self.low

    @property
    def words(self) -> str:
        at_least = "at least " if self.is_low_open or self.is_high_open else ""
        return f"{at_least}{self.factor:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A condition, named by its shortest label; `labels` and `means` are by rate, ascending.

    `width` is None where the best is not positive; `seed_widths` are of single seeds that have every rate.
    """

    label: str
    labels: Mapping[float, str]
    means: Mapping[float, float]
    width: Width | None
    seed_widths: tuple[Width, ...]


def sensitivities(
    declared: Mapping[str, Mapping[str, Any]], values: Mapping[str, Values], *, direction: Direction
) -> tuple[Sensitivity, ...]:
    """Return a curve for each set of three conditions or more that differ only in their learning rate.

    `declared` has each condition's keys by label, `values` its metric by seed.
    """
    groups: dict[str, dict[float, str]] = {}
    for label, keys in declared.items():
        rate = keys.get(LR)
        if isinstance(rate, float) and values.get(label):
            others = {name: value for name, value in keys.items() if name != LR}
            groups.setdefault(json.dumps(others, sort_keys=True, default=str), {})[rate] = label
    return tuple(_curve(group, values, direction) for group in groups.values() if len(group) >= FEWEST_RATES)


def _curve(group: Mapping[float, str], values: Mapping[str, Values], direction: Direction) -> Sensitivity:
    rates = sorted(group)
    by_rate = [values[group[rate]] for rate in rates]
    means = [float(np.mean(list(each.values()))) for each in by_rate]
    seeds = [seed for seed in by_rate[0] if all(seed in each for each in by_rate)]
    of_seeds = (kept_width(rates, [each[seed] for each in by_rate], direction) for seed in seeds)
    return Sensitivity(
        label=min(group.values(), key=len),
        labels={rate: group[rate] for rate in rates},
        means=dict(zip(rates, means, strict=True)),
        width=kept_width(rates, means, direction),
        seed_widths=tuple(width for width in of_seeds if width),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RateByRate:
    """A condition against the baseline, by the rate of the condition; `survives`: it is better at each of them."""

    condition: str
    baseline: str
    differences: Mapping[float, float | None]
    verdicts: Mapping[float, Verdict]
    num_comparisons: int
    survives: bool


def rate_by_rate(
    curves: Sequence[Sensitivity],
    baseline: str,
    pairing: Callable[[str, str], Pairing],
    *,
    alpha: float,
    direction: Direction,
) -> tuple[RateByRate, ...]:
    """Return the comparisons with the baseline's curve of all curves that have the same multiples of their rates."""
    if (own := next((each for each in curves if baseline in each.labels.values()), None)) is None:
        return ()
    others = [each for each in curves if each is not own and _multiples(each) == _multiples(own)]
    pairs = [pair for each in others for pair in zip(own.labels.values(), each.labels.values(), strict=True)]
    found = iter(judge([pairing(first, second) for first, second in pairs], alpha=alpha, direction=direction))

    def is_better(each: Comparison) -> bool:
        is_gain = each.difference is not None and (each.difference > 0.0) == (direction is Direction.HIGHER)
        return is_gain and each.p is not None and at_most(len(others) * each.p, alpha)

    by_rate = [(each, {rate: next(found) for rate in each.labels}) for each in others]
    return tuple(
        RateByRate(
            condition=each.label,
            baseline=own.label,
            differences={rate: one.difference for rate, one in by.items()},
            verdicts={rate: one.verdict for rate, one in by.items()},
            num_comparisons=len(pairs),
            survives=all(map(is_better, by.values())),
        )
        for each, by in by_rate
    )


def _multiples(curve: Sensitivity) -> list[str]:
    return [f"{rate / min(curve.labels):.6g}" for rate in curve.labels]


def rate_by_rate_sentence(found: RateByRate, metric: Metric) -> str:
    """Return `maxrl+none against grpo+none, rate by rate: +1.2 pp at lr 0.001, +8.0 pp at lr 0.002 (better) ...`."""
    rates = [
        f"{shown_difference(found.differences[rate], metric)} at lr {rate:.3g}"
        + (f" ({verdict})" if verdict is not Verdict.CANNOT_TELL else "")
        for rate, verdict in found.verdicts.items()
    ]
    line = (
        f"{found.condition} against {found.baseline}, rate by rate: {', '.join(rates)} (exploratory, Holm's correction "
    )
    return f"{line}over {found.num_comparisons}); {'' if found.survives else 'not shown to be '}better at each rate"


def kept_width(rates: Sequence[float], means: Sequence[float], direction: Direction) -> Width | None:
    """Return the rates around the best one between which `means` keep 90 % of it; if lower is better, up to best / 0.9.

    None if the best is not positive, since a share of it says nothing.
    """
    is_higher = direction is Direction.HIGHER
    best = max(means) if is_higher else min(means)
    if best <= 0.0:
        return None
    limit = best * KEPT_FRAC if is_higher else best / KEPT_FRAC
    top = list(means).index(best)
    points = list(zip(map(math.log, rates), means, strict=True))

    def crossing(path: Sequence[tuple[float, float]]) -> tuple[float, bool]:
        for (x, y), (further_x, further_y) in pairwise(path):
            if (further_y < limit) if is_higher else (further_y > limit):
                return math.exp(x + (further_x - x) * (y - limit) / (y - further_y)), False
        return math.exp(path[-1][0]), True

    (low, is_low_open), (high, is_high_open) = crossing(points[top::-1]), crossing(points[top:])
    return Width(best=rates[top], low=low, high=high, is_low_open=is_low_open, is_high_open=is_high_open)


def sensitivity_sentence(found: Sensitivity, metric: Metric) -> str:
    """Return `grpo+none: best 54.2% at lr 0.001; keeps 90 % of it from lr 0.0004 to 0.0031, a factor of 7.8 (...)`."""
    width = found.width
    if width is None:
        return f"{found.label}: no value is positive, so there is no share of its best to keep"
    best, rates = shown(found.means[width.best], metric), list(found.means)
    seeds = sorted(each.factor for each in found.seed_widths)
    single = f" (single seeds: {seeds[0]:.3g} to {seeds[-1]:.3g})" if len(seeds) > 1 else ""
    line = f"{found.label}: best {best} at lr {width.best:.3g}; keeps 90 % of it from lr {width.low:.3g} to "
    line += f"{width.high:.3g}, a factor of {width.words}{single}"
    edge = {rates[0]: "smallest", rates[-1]: "largest"}.get(width.best)
    return f"{line}; the best lr is the {edge} tried: widen the range" if edge else line
