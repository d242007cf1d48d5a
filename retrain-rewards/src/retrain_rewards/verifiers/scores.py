"""From the library's numbers to a score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from retrain.api import Outcome, Score


def score_of(value: Any, parts: Mapping[str, Any]) -> Score:
    """The library's reward and its parts; failed unless the reward is a finite number. Other parts are left out."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Score.failed(f"the reward is {value!r}, not a number")
    if not math.isfinite(number):
        return Score.failed(f"the reward is {number}, not a finite number")
    kept = {str(name): float(part) for name, part in parts.items() if isinstance(part, (int, float))}
    finite = {name: part for name, part in kept.items() if math.isfinite(part)}
    return Score(outcome=Outcome.SCORED, value=number, parts=finite)
