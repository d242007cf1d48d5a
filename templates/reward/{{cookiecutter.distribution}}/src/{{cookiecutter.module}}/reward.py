"""Reward `{{ cookiecutter.name }}`: the number in the last box of a completion against the reference."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from retrain.api import Example, PluginContext, Score

BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
# Digits are bounded, so that no text a model may write makes the search or the conversion slow.
UNSIGNED = r"(?:\d{1,32}(?:\.\d{0,32})?|\.\d{1,32})"
NUMBER = re.compile(r"[+-]?" + UNSIGNED + r"(?:[eE][+-]?\d{1,3}|/" + UNSIGNED + ")?")


@dataclass(frozen=True, slots=True)
class CloseNumber:
    """1.0 when the last box holds a number within `tolerance` of the reference, relative to it, else 0.0.

    It travels, pickled, to the processes that score, so it holds plain data alone.
    """

    tolerance: float = 1e-6

    def score(self, example: Example, text: str) -> Score:
        """Judge one completion; no verdict when the reference is no number."""
        wanted = value(example.reference)
        if wanted is None:
            return Score.no_verdict(f"the reference {example.reference!r} is no number")
        boxes = BOX.findall(text)
        given = value(boxes[-1]) if boxes else None
        return Score.of(float(given is not None and math.isclose(given, wanted, rel_tol=self.tolerance)))

    def gold(self, example: Example) -> str | None:
        """A completion that must score 1: retrain tries it before training."""
        return None if value(example.reference) is None else r"\boxed{" + example.reference + "}"


def value(text: str) -> float | None:
    """The number that `text` is, fractions included; None when it is none, or has no finite value."""
    text = text.strip()
    if not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.partition("/")
    below = float(denominator) if denominator else 1.0
    number = float(numerator) / below if below else math.inf
    return number if math.isfinite(number) else None


def create(context: PluginContext) -> CloseNumber:
    """The reward; `context.config` has the whole configuration, should yours need more."""
    return CloseNumber()
