"""Reads the architecture of a Llama-family decoder from `config.json`, or recognises that it is another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retrain_local.model.rotary import Rotation

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
