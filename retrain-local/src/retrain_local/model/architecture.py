"""Reads the architecture of a Llama-family decoder from `config.json`, its rotary embeddings included."""

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
        """Read `rope_parameters`, or `rope_scaling` and `rope_theta` of older files; None for an unknown type.

        Types whose angles depend on the length of the row (dynamic, longrope) are unknown.
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
        """Return radians per position of the head_size / 2 pairs, in fp32, and the factor on cosine and sine."""
        powers = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        return FREQUENCIES[self.kind](self, self.theta**powers)


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

    def magnitude(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return frequencies, float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return frequencies, magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return frequencies, magnitude(1.0)


FREQUENCIES: dict[str, Callable[[Rotation, Tensor], tuple[Tensor, float]]] = {
    "default": lambda rotation, wavelengths: (1.0 / wavelengths, 1.0),
    "linear": lambda rotation, wavelengths: (1.0 / wavelengths / rotation.parameters["factor"], 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
}


Values = Mapping[str, Any]  # of a config.json, with defaults
SLIDING, FULL = "sliding_attention", "full_attention"
ATTENTION_INPUTS = frozenset({"q_proj", "k_proj", "v_proj"})
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The defaults of transformers; sizes without a default are not in these lists.
COMMON: Values = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
}
QWEN: Values = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}


def _llama_biases(values: Values) -> frozenset[str]:
    attention = ATTENTION_INPUTS | {"o_proj"} if values.get("attention_bias") else frozenset()
    return attention | (frozenset({"gate_proj", "up_proj", "down_proj"}) if values.get("mlp_bias") else frozenset())


def _qwen_windows(values: Values) -> tuple[int | None, ...] | None:
    window = (values["sliding_window"] or None) if values["use_sliding_window"] else None
    layers, first = values["num_hidden_layers"], values["max_window_layers"]
    types = values["layer_types"] or [SLIDING if window and at >= first else FULL for at in range(layers)]
    if len(types) != layers or set(types) - {SLIDING, FULL}:
        return None
    return tuple(window if name == SLIDING else None for name in types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A `model_type` that `LlamaDecoder` computes, and its differences from Llama.

    `saved_by` is its class in transformers. `biased` returns the projections with a bias, `windows` the `windows` of an
    `Architecture`, or None for layers that are not computed here.
    """

    saved_by: str
    defaults: Values
    biased: Callable[[Values], frozenset[str]] = lambda values: frozenset()
    windows: Callable[[Values], tuple[int | None, ...] | None] = lambda values: (None,) * values["num_hidden_layers"]
    normalises_heads: bool = False


# The door for another model of this kind; `memory.sizes.NATIVE` lists the same names without torch.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        saved_by="LlamaForCausalLM",
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048},
        biased=_llama_biases,
    ),
    "qwen2": Family(
        saved_by="Qwen2ForCausalLM", defaults=QWEN, biased=lambda values: ATTENTION_INPUTS, windows=_qwen_windows
    ),
    "qwen3": Family(
        saved_by="Qwen3ForCausalLM",
        defaults={**QWEN, "head_dim": 128},
        biased=lambda values: ATTENTION_INPUTS | {"o_proj"} if values.get("attention_bias") else frozenset(),
        windows=_qwen_windows,
        normalises_heads=True,
    ),
    "mistral": Family(
        saved_by="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
        windows=lambda v: None if v["layer_types"] else (v["sliding_window"] or None,) * v["num_hidden_layers"],
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of the Llama family: RMS norms, rotary positions, grouped queries, SwiGLU.

    `windows`: for each layer the number of keys that a token sees, itself included; None for all of them.
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
        return len(self.windows)


def read_architecture(document: Values) -> Architecture | None:
    """Return the architecture that a config.json describes; None if only the modules of transformers can compute it.

    This includes quantised weights, custom code and models that another class has saved.
    """
    family = FAMILIES.get(str(document.get("model_type")))
    if family is None or document.get("quantization_config") or document.get("auto_map"):
        return None
    if family.saved_by not in (document.get("architectures") or [family.saved_by]):
        return None
    values = {**COMMON, **family.defaults, **document}
    sizes = [values.get(name) for name in SIZES]
    rotation = Rotation.of(values)
    if rotation is None or values["hidden_act"] != "silu" or not all(type(size) is int and size > 0 for size in sizes):
        return None
    heads, windows = values["num_attention_heads"], family.windows(values)
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
        normalises_heads=family.normalises_heads,
        biased=family.biased(values),
    )
