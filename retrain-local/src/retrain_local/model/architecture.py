"""Reads the architecture of a Llama-family decoder from `config.json`, its rotary embeddings included.

None for any other architecture, and for scaling of rotary embeddings that depends on the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


# the defaults of transformers; sizes without a default are not in this list
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of the Llama family: RMS norms, rotary positions, grouped queries, SwiGLU.

    `windows` holds, for each layer, how many keys a token sees, itself included, None for all of them.
    """

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    context: int | None
    norm_eps: float
    rotation: Rotation
    windows: tuple[int | None, ...]
    is_tied: bool
    normalises_heads: bool = False
    biased: frozenset[str] = field(default_factory=frozenset)  # projections with a bias

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)


def read_architecture(document: Mapping[str, Any]) -> Architecture | None:
    """The architecture that a config.json describes; None if only the modules of transformers can compute it."""
    kind = document.get("model_type")
    if kind not in DEFAULTS or not _is_plain(document, kind):
        return None
    values = COMMON | DEFAULTS[kind] | dict(document)
    sizes = [values.get(name) for name in SIZES]
    rotation = Rotation.of(values)
    if rotation is None or values["hidden_act"] != "silu" or not all(type(size) is int and size > 0 for size in sizes):
        return None
    heads = values["num_attention_heads"]
    windows = _windows(kind, values)
    kv_heads = values["num_key_value_heads"] or heads
    if windows is None or type(kv_heads) is not int or heads % kv_heads:
        return None
    context = values["max_position_embeddings"]
    return Architecture(
        vocabulary=values["vocab_size"],
        hidden=values["hidden_size"],
        inner=values["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_size=values["head_dim"] or values["hidden_size"] // heads,
        context=context if isinstance(context, int) and context > 0 else None,
        norm_eps=float(values["rms_norm_eps"]),
        rotation=rotation,
        windows=windows,
        is_tied=bool(values["tie_word_embeddings"]),
        normalises_heads=kind == "qwen3",
        biased=_biased(kind, values),
    )


def _is_plain(document: Mapping[str, Any], kind: str) -> bool:
    """Whether the model is unquantised, without custom code, and saved by the standard class."""
    classes = document.get("architectures") or [CLASSES[kind]]
    special = document.get("quantization_config") or document.get("auto_map")
    return not special and CLASSES[kind] in classes


def _windows(kind: str, values: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    layers: int = values["num_hidden_layers"]
    window: int | None = values["sliding_window"] or None
    given: list[str] | None = values["layer_types"]
    if kind == "llama":
        return (None,) * layers
    if kind == "mistral":
        return (window,) * layers if given is None else None
    if not values["use_sliding_window"]:
        window = None
    sliding, full = "sliding_attention", "full_attention"
    types: list[str] = given or [
        sliding if window and at >= values["max_window_layers"] else full for at in range(layers)
    ]
    if len(types) != layers or set(types) - {sliding, full}:
        return None
    return tuple(window if name == sliding else None for name in types)


def _biased(kind: str, values: Mapping[str, Any]) -> frozenset[str]:
    attention = {"q_proj", "k_proj", "v_proj"}
    if kind == "qwen2":
        return frozenset(attention)
    found: set[str] = attention | {"o_proj"} if kind in ("llama", "qwen3") and values.get("attention_bias") else set()
    if kind == "llama" and values.get("mlp_bias"):
        found |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(found)
