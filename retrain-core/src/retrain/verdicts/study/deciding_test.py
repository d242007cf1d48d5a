"""What a test tells the judge, and how often was looked before it did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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


class Design(StrEnum):
    """Which test decides."""

    FIXED = "fixed"
    UNPAIRED = "unpaired"
    PLANNED = "planned looks"
    ANYTIME = "anytime"


@dataclass(frozen=True, slots=True, kw_only=True)
class LooksView:
    """How often was looked at one comparison, and which test allows for that.

    With planned looks: `planned` and `taken` are numbers of seeds, `decided_after` the look at which the verdict came.
    With `anytime`: `taken` are the earlier looks on record, and `reason` says what was not planned.
    """

    design: Design
    reason: str = ""
    planned: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    spend: str | None = None
    decided_after: int | None = None

    @property
    def next_look(self) -> int | None:
        """Seeds of the next planned look."""
        return next((look for look in self.planned if look > max(self.taken, default=0)), None)


def looks_sentence(view: LooksView) -> str:
    """How often was looked, and by which test that is judged; empty for one look at a fixed number of seeds."""
    match view.design:
        case Design.FIXED:
            return ""
        case Design.UNPAIRED:
            return "judged by the planned permutation test of unpaired runs"
        case Design.ANYTIME:
            return f"judged by a stricter test, because {view.reason}"
    looked = f"{len(view.taken)} of {len(view.planned)} planned looks taken ({view.spend} spending)"
    if view.decided_after is not None:
        return f"decided at the planned look of {view.decided_after} seeds; {looked}"
    return f"{looked}; the next is at {view.next_look} seeds" if view.next_look else looked
