"""Rotary position embeddings: the frequency of each channel pair, for scaling types independent of the length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Type and parameters as `rope_parameters` of a config.json names them; `context` = max_position_embeddings."""

    kind: str
    theta: float
    context: int | None
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Rotation | None:
        """From `rope_parameters`, or `rope_scaling` and `rope_theta` of older files; None for a type not known here.

        Types whose angles depend on the length of the row (dynamic, longrope) are not.
        """
        given = values.get("rope_scaling") or values.get("rope_parameters") or {}
        theta = given.get("rope_theta", values.get("rope_theta", DEFAULT_THETA))
        kind = given.get("rope_type", given.get("type", "default"))
        share = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
        if kind not in FREQUENCIES or share != 1.0:
            return None
        context = values.get("max_position_embeddings")
        before = values.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        parameters = dict(given) | {"original_max_position_embeddings": before or context}
        return cls(kind=kind, theta=float(theta), context=context, parameters=parameters)

    def frequencies(self, head_size: int) -> tuple[Tensor, float]:
        """Radians per position of each of the head_size / 2 pairs, in fp32, and the factor on cosine and sine."""
        powers = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        return FREQUENCIES[self.kind](self, self.theta**powers)


def _default(rotation: Rotation, wavelengths: Tensor) -> tuple[Tensor, float]:
    return 1.0 / wavelengths, 1.0


def _linear(rotation: Rotation, wavelengths: Tensor) -> tuple[Tensor, float]:
    return 1.0 / wavelengths / rotation.parameters["factor"], 1.0


def _llama3(rotation: Rotation, wavelengths: Tensor) -> tuple[Tensor, float]:
    """Low frequencies are divided by `factor`, high ones kept, those in between interpolated."""
    given = rotation.parameters
    factor, slow, fast = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    before = given["original_max_position_embeddings"]
    frequencies = 1.0 / wavelengths
    periods = 2 * math.pi / frequencies
    slowed = torch.where(periods > before / slow, frequencies / factor, frequencies)
    share = (before / periods - slow) / (fast - slow)
    between = (1 - share) * slowed / factor + share * slowed
    is_between = (periods <= before / slow) & (periods >= before / fast)
    return torch.where(is_between, between, slowed), 1.0


def _yarn(rotation: Rotation, wavelengths: Tensor) -> tuple[Tensor, float]:
    """Peng et al. 2023 (arXiv:2309.00071), with the parameters of later models."""
    given, pairs = rotation.parameters, len(wavelengths)
    before = given["original_max_position_embeddings"]
    factor = given.get("factor") or (rotation.context or before) / before

    def pair_with(rotations: float) -> float:
        return pairs * math.log(before / (rotations * 2 * math.pi)) / math.log(rotation.theta)

    low, high = pair_with(given.get("beta_fast") or 32), pair_with(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    extrapolated = 1 - ramp.clamp(0, 1)
    frequencies = 1.0 / (factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated
    return frequencies, _attention_factor(given, factor)


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def magnitude(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return magnitude(1.0)


FREQUENCIES: dict[str, Callable[[Rotation, Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
