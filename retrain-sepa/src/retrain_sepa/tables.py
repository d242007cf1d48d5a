"""The TOML tables of this distribution: `[gtpo]`, `[hicra]`, `[sepa]`, `[planning]`."""

from __future__ import annotations

import json
from functools import partial
from typing import Literal

from pydantic import field_validator

import retrain.api
from retrain.api import Kind, Table, key

of_sepa = partial(key, needs="controller sepa")


class GtpoTable(Table):
    """Influence of uncertainty on the credit of tokens."""

    beta: float = key(0.1, "Strength; 0 = every token alike. The mean weight is 1 up to 1.", ge=0.0, needs="stage gtpo")


class HicraTable(Table):
    """Extra credit of planning tokens."""

    alpha: float = key(
        0.2, "Strength; 0 = off. It softens the penalties of planning tokens.", ge=0.0, le=1.0, needs="stage hicra"
    )


class SepaTable(Table):
    """The schedule by which uncertainty is pooled over execution tokens."""

    steps: int = of_sepa(500, "Length of the linear ramp in steps; 0 = no ramp.", ge=0)
    schedule: Literal["linear", "auto"] = of_sepa("linear", "linear, or auto: the larger of ramp and variance rule.")
    delay_steps: int = of_sepa(50, "Steps before the ramp starts.", ge=0)
    correct_rate_gate: float = of_sepa(
        0.1, "Lambda stays 0 until a step's correct rate reaches this; 0 = open from the start.", ge=0.0, le=1.0
    )
    ema_decay: float = of_sepa(0.99, "Decay per step of the averaged execution variance (auto).", ge=0.0, lt=1.0)
    threshold: float = of_sepa(
        0.2, "Fraction of the starting variance below which pooling begins (auto).", gt=0.0, le=1.0
    )
    warmup_steps: int = of_sepa(50, "Steps with a variance before its starting value is fixed (auto).", ge=1)


class PlanningTable(retrain.api.PlanningTable):
    """The detection of planning tokens."""

    detector: str = key(
        "regex", "regex, semantic or a plugin.", names=Kind.PLANNING_DETECTOR, needs="planning detector"
    )
    model: str = key(
        "all-MiniLM-L6-v2", "Sentence embedding model (semantic).", needs="planning.detector", reads="model"
    )
    threshold: float = key(0.02, "Margin of the planning similarity (semantic).", needs="planning.detector")


class PlanningPhrases(Table):
    """The key that [logging] gets for planning phrases."""

    strategic_grams: str = key(
        "", "Planning phrases, JSON array or comma-separated; empty = the default list.", needs="planning detector"
    )

    @field_validator("strategic_grams")
    @classmethod
    def _phrases(cls, text: str) -> str:
        if text.strip().startswith("["):
            try:
                grams = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"not a JSON array: {error}") from error
            if not all(isinstance(gram, str) for gram in grams):
                raise ValueError("every phrase of the JSON array must be text")
        return text
