"""Reward `{{ cookiecutter.name }}`: compares the number in the last box with the reference."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field
from retrain.api import Example, PluginContext, {% if cookiecutter.form == "file" %}PluginSpec, {% endif %}Score

BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
# Digits are bounded, so that no model output can make the search or the conversion slow.
UNSIGNED = r"(?:\d{1,32}(?:\.\d{0,32})?|\.\d{1,32})"
NUMBER = re.compile(r"[+-]?" + UNSIGNED + r"(?:[eE][+-]?\d{1,3}|/" + UNSIGNED + ")?")


class Params(BaseModel):
    """`[reward.params]`: how far from the reference a number may be, as a fraction of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tolerance: float = Field(default=1e-6, ge=0.0, lt=1.0)


@dataclass(frozen=True, slots=True)
class CloseNumber:
    """1.0 when the last box holds a number within the relative `tolerance` of the reference, otherwise 0.0.

    It is pickled and sent to the scoring processes, so it holds only plain data.
    """

    tolerance: float

    def score(self, example: Example, text: str) -> Score:
        """Score one completion; no verdict when the reference is not a number."""
        expected = value(example.reference)
        if expected is None:
            return Score.no_verdict(f"the reference {example.reference!r} is not a number")
        boxes = BOX.findall(text)
        given = value(boxes[-1]) if boxes else None
        return Score.of(float(given is not None and math.isclose(given, expected, rel_tol=self.tolerance)))

    def gold(self, example: Example) -> str | None:
        """A completion that must score 1; retrain tries it before training."""
        return None if value(example.reference) is None else r"\boxed{" + example.reference + "}"


def value(text: str) -> float | None:
    """Return the value of `text`, a number or a fraction; None when it is not finite."""
    text = text.strip()
    if not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.partition("/")
    below = float(denominator) if denominator else 1.0
    number = float(numerator) / below if below else math.inf
    return number if math.isfinite(number) else None


def create(context: PluginContext) -> CloseNumber:
    """The reward that `[reward.params]` describes."""
    params = context.params if isinstance(context.params, Params) else Params()
    return CloseNumber(params.tolerance)
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Params,
)
{% endif %}
