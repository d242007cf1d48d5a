"""Numbers as people read them."""

from __future__ import annotations

import math

from retrain.rooms.insight.report.chart_specs import Unit
from retrain.rooms.text.terminal_text import ABSENT


def value_text(value: float | None, unit: Unit = Unit.NUMBER) -> str:
    """A value of a chart."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if unit is Unit.SHARE:
        return f"{100 * value:.1f}%"
    return f"{value:.3g} s" if unit is Unit.SECONDS else f"{value:.4g}"


def amount(value: float) -> str:
    """A count in three digits: `12.3 million`."""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def plural(count: int, name: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
