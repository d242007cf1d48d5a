"""From repeated measurements to a figure and its uncertainty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value; of one alone, the quartiles are the value."""
        if len(values) < 2:
            return cls(median=values[0], low=values[0], high=values[0], count=len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, count=len(values))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Spread(median=self.median * factor, low=low, high=high, count=self.count)


def ratios(ours: Sequence[Sequence[float]] | None, theirs: Sequence[Sequence[float]]) -> Spread | None:
    """How many times longer theirs took: the ratio of the medians, one of each round, which ran side by side.

    None without ours.
    """
    if ours is None:
        return None
    pairs = zip(ours, theirs, strict=True)
    return Spread.of([statistics.median(slow) / statistics.median(fast) for fast, slow in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """y = c x^exponent, fitted to points, with the 95 % interval of the exponent (infinite for two points)."""

    exponent: float
    low: float
    high: float
    points: int


def growth(xs: Sequence[float], ys: Sequence[float]) -> Growth:
    """Least squares of log y on log x; the interval is that of the slope under normal errors.

    The points of one series are few, so the interval is wide where they do not lie on a line.
    """
    from scipy import stats

    if len(set(xs)) < 2:
        raise ValueError("an exponent needs two different sizes")
    fit = stats.linregress([math.log(x) for x in xs], [math.log(y) for y in ys])
    freedom = len(xs) - 2
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * fit.stderr) if freedom else math.inf
    slope = float(fit.slope)
    return Growth(exponent=slope, low=slope - half, high=slope + half, points=len(xs))
