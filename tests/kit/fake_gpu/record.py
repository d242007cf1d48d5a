"""The record of a fake GPU: waits of the host, faults, launches, operations and products, each with its place."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tests.kit.fake_gpu.work import Work

PACKAGE = "/retrain_local/"
OUTSIDE = "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of `retrain_local`: `function` is its file and function, such as "sampling/decode.py Batch.load"."""

    function: str = OUTSIDE
    line: int = 0

    def __str__(self) -> str:
        return f"{self.function}:{self.line}" if self.line else self.function


def place_of_caller() -> Place:
    """Return the innermost line of `retrain_local` on the stack of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if PACKAGE in code.co_filename and "/tests/" not in code.co_filename:
            return Place(function=f"{code.co_filename.partition(PACKAGE)[2]} {code.co_qualname}", line=frame.f_lineno)
        frame = frame.f_back
    return Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The host waited for the device: `what` is the operation, such as "tolist"."""

    phase: str
    what: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error that a GPU would report, or would not even report: `kind` is graph, capture, dtype, device or triton."""

    kind: str
    what: str
    phase: str
    place: Place

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} at {self.place} [{self.phase}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A launch's argument: `kind` is pointer, int, float, bool or constant; `value` is a dtype for a pointer."""

    kind: str
    value: Any
    is_aligned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launch:
    """A launch of a Triton kernel with its arguments by name and its options such as num_warps."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Argument]
    options: dict[str, Any]
    phase: str
    place: Place

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """Counts since the GPU was made; `operations` and `products` are by phase, the latter with the operands' dtypes.

    `captured` are the launches of each captured graph. `work` is by phase, operation and function.
    """

    waits: Counter[Wait] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    products: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    captured: list[Counter[str]] = field(default_factory=list)
    replays: int = 0
    work: dict[tuple[str, str, str], Work] = field(default_factory=dict)

    def waits_in(self, *phases: str) -> Counter[str]:
        """Return the waits of these phases by function and operation."""
        found: Counter[str] = Counter()
        for wait, count in self.waits.items():
            if wait.phase in phases:
                found[f"{wait.place.function}: {wait.what}"] += count
        return found

    def operations_in(self, phase: str) -> Counter[str]:
        return Counter({name: count for (each, name), count in self.operations.items() if each == phase})
