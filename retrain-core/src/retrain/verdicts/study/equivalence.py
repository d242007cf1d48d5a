"""`practically the same`: the interval of the difference lies inside the margin that the plan names.

Two one-sided tests (D. J. Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15:657, 1987), each at alpha / 2 divided
by the number of comparisons: the interval at 1 - alpha / m. So a difference of the margin or more is called the same
anywhere in the family in at most alpha / 2 of campaigns. The levels of Holm's steps would not do: at the last step
stands the smallest of m differences, with an interval that knows nothing of the others. TOST at 1 - 2 alpha, which is
common, would need fewer seeds, and an interval that is not the one on the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from retrain.verdicts.stats.flip import patterns_for
from retrain.verdicts.study.comparison import Comparison, Verdict, VerdictReason
from retrain.verdicts.study.judge import Pairing, deciding_test


def with_margin(
    comparisons: Sequence[Comparison], pairings: Sequence[Pairing], margin: float | None
) -> tuple[Comparison, ...]:
    """The comparisons of `pairings`, `practically the same` where the interval is strictly inside (-margin, margin).

    That holds where the test finds a difference, too: it is there, and by the plan too small to matter. An infinite
    limit is never inside. A comparison that is the same, or without a finding, then has the interval of this test.
    Without a margin nothing is the same.
    """
    if margin is None:
        return tuple(comparisons)
    pairs = zip(comparisons, pairings, strict=True)
    return tuple(_against(each, pairing, margin) for each, pairing in pairs)


def _against(comparison: Comparison, pairing: Pairing, margin: float) -> Comparison:
    told = replace(comparison, margin=margin)
    test = deciding_test(pairing, patterns_for(comparison.num_comparisons, comparison.alpha))
    if test is None:
        return told
    level = 1.0 - comparison.alpha / comparison.num_comparisons
    interval = test.interval(level)
    is_found = comparison.verdict in (Verdict.BETTER, Verdict.WORSE)
    if not all(math.isfinite(limit) and -margin < limit < margin for limit in interval):
        return told if is_found else replace(told, interval=interval, level=level)
    cause = VerdictReason.FOUND_WITHIN if is_found else VerdictReason.WITHIN
    return replace(told, interval=interval, level=level, verdict=Verdict.PRACTICALLY_SAME, cause=cause)
