"""Words for numbers: times, sizes, counts, rates and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

ABSENT = "—"  # a value that is missing


def duration(seconds: float | None) -> str:
    """Elapsed time: `0.3 ms`, `2.1 s`, `12 s`, `1:02:03`, `3 days, 11:20:00`; a dash where it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 1:
        return f"{float(f'{1000 * seconds:.2g}'):g} ms"
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return str(timedelta(seconds=round(seconds)))


def size(num_bytes: float) -> str:
    """Bytes: `1.5 GiB`, `420 MiB`, `12 B`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def counted(count: int, noun: str) -> str:
    """`1 error`, `1,200 errors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def amount(value: float) -> str:
    """A count in three digits: `12.3 million`."""
    for scale, name in ((1e9, "billion"), (1e6, "million")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value:,.0f}"


def decimal(value: float | None, digits: int) -> str:
    """A number with `digits` after the point; a dash for None."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share in [0, 1] as `41.2%`; a dash for None."""
    return ABSENT if share is None else f"{100 * share:.{digits}f}%"


def rate_interval(low: float | None, high: float | None) -> str:
    """The interval of a rate, in percent, to follow that rate: `[38.0, 44.5]`; empty without one."""
    return "" if low is None or high is None else f"[{100 * low:.1f}, {100 * high:.1f}]"
