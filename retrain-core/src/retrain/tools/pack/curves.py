"""Curves as SVG without a script: a few lines over steps, axes with round numbers, and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 220, 52, 12, 10, 28
MOST_POINTS = 300
COLORS = 8  # classes c0 to c7 of the style sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line: its name, and points (step, value)."""

    label: str
    points: Sequence[tuple[float, float]]


def figure(title: str, curves: Sequence[Curve]) -> str:
    """A figure with its legend below; at least one curve has a point."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    low, high = min(ys), max(ys)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x_of(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - x_low) / (x_high - x_low)

    def y_of(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)

    marks = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>'
        f'<text class="end" x="{LEFT - 6}" y="{y_of(y) + 4:.1f}">{y:g}</text>'
        for y in ticks
    )
    base = HEIGHT - BOTTOM + 18
    marks += f'<text x="{LEFT}" y="{base}">{x_low:g}</text>'
    marks += f'<text class="end" x="{WIDTH - RIGHT}" y="{base}">{x_high:g} steps</text>'
    drawn = "".join(_line(curve, number % COLORS, x_of, y_of) for number, curve in enumerate(curves))
    legend = "".join(
        f'<li><span class="key c{number % COLORS}"></span>{escape(curve.label)}</li>'
        for number, curve in enumerate(curves)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">{marks}{drawn}</svg>'
        f"<ul>{legend}</ul></figure>"
    )


def _line(curve: Curve, color: int, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    stride = math.ceil(len(curve.points) / MOST_POINTS)
    kept = [*curve.points[::stride], *([curve.points[-1]] if (len(curve.points) - 1) % stride else [])]
    points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in kept)
    ends = "".join(f'<circle class="c{color}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5"/>' for x, y in kept[:60])
    return f'<polyline class="c{color}" points="{points}"/>{ends if len(kept) <= 60 else ""}'


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from at or below the lowest to at or above the highest value."""
    span = max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-9)
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * each for each in (1, 2, 2.5, 5, 10) if span / (size * each) <= 4.0)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [float(f"{step * number:.9g}") for number in range(first, last + 1)]
