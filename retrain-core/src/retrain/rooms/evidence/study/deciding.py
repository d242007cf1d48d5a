"""What a test must tell the judge: a p value, and the interval that agrees with it at any level."""

from __future__ import annotations

from typing import Protocol


class DecidingTest(Protocol):
    """A test of the differences of one pairing against zero.

    `p` may be corrected by Holm. `smallest_p` is what it could be at best with as many seeds.
    """

    @property
    def p(self) -> float:
        """Two-sided p value."""

    @property
    def smallest_p(self) -> float:
        """The least that p could be with these seeds."""

    def interval(self, level: float) -> tuple[float, float]:
        """Interval of the mean difference that leaves out zero exactly where p <= 1 - level; limits may be infinite."""
