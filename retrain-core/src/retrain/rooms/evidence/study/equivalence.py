"""`practically the same`: the interval of the difference lies inside the margin that the plan names.

The interval is the one of the verdict, at its level of 1 - alpha (after the correction): two one-sided tests at half
of alpha each (Schuirmann 1987), so that a difference of the margin or more is called the same in at most alpha / 2 of
campaigns. TOST at 1 - 2 alpha would find it sooner, with an interval that is not the one on the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from retrain.rooms.evidence.study.family import Comparison, Verdict, VerdictReason


def with_margin(comparisons: Sequence[Comparison], margin: float | None) -> tuple[Comparison, ...]:
    """The comparisons, those with an interval strictly inside (-margin, margin) as `practically the same`.

    That holds where the test finds a difference, too: it is there, and by the plan too small to matter. An infinite
    limit is never inside. Without a margin nothing is the same.
    """
    if margin is None:
        return tuple(comparisons)
    return tuple(_within(each, margin) for each in comparisons)


def _within(comparison: Comparison, margin: float) -> Comparison:
    interval = comparison.interval
    if interval is None or len(comparison.seeds) < 2:
        return replace(comparison, margin=margin)
    if not all(math.isfinite(limit) and -margin < limit < margin for limit in interval):
        return replace(comparison, margin=margin)
    is_found = comparison.verdict in (Verdict.BETTER, Verdict.WORSE)
    cause = VerdictReason.FOUND_WITHIN if is_found else VerdictReason.WITHIN
    return replace(comparison, margin=margin, verdict=Verdict.PRACTICALLY_SAME, cause=cause)
