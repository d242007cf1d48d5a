"""Whether a step that was trained again is the step on record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 1e-2, 1e-3  # what rounding on another machine may change; another policy changes far more
MEASURED = ("grad_norm", "ratio_mean", "logprob_gap_mean", "lr")  # on record wherever the step was trained
SKIPPED = ("loss_is_placeholder", "rejected", "reported_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The fields of the optimizer step that were compared, and those that differ, as recorded and as found now."""

    compared: tuple[str, ...]
    different: Mapping[str, tuple[Any, Any]]

    @property
    def is_exact(self) -> bool:
        """Whether every field has the same bits."""
        return not self.different

    @property
    def is_close(self) -> bool:
        """Whether rounding explains the differences: within 1 % or 0.001 each, and the gradient's norm within 1 %."""
        return all(_close(name, *values) for name, values in self.different.items())

    @property
    def worst(self) -> str:
        """The first difference that matters, in words."""
        names = sorted(self.different, key=lambda name: _close(name, *self.different[name]))
        was, now = self.different[names[0]]
        return f"{names[0]} {now}, and {was} is recorded"


def agreement(line: Mapping[str, Any], found: Mapping[str, Any]) -> Agreement:
    """Hold what a training step reports now against its line in `metrics.jsonl`."""
    measured = [name for name in MEASURED if name in line]
    names = tuple(name for name in dict.fromkeys([*found, *measured]) if name not in SKIPPED)
    different = {name: (line.get(name), found.get(name)) for name in names if line.get(name) != found.get(name)}
    return Agreement(compared=names, different=different)


def _close(name: str, was: Any, now: Any) -> bool:
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return all(_close(name, *pair) for pair in zip(was, now, strict=True))
    if not isinstance(was, int | float) or not isinstance(now, int | float):
        return False
    absolute = 0.0 if name in ("grad_norm", "trained_tokens", "updates", "lr") else ABSOLUTE
    return math.isclose(was, now, rel_tol=0.0 if name in ("trained_tokens", "updates") else RELATIVE, abs_tol=absolute)
