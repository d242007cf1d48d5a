from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from retrain_local.model.architecture import COMMON, FAMILIES, Rotation, read_architecture
from tests.kit.random_models import LLAMA3, SLIDING

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


SAVED = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 77, "rope_theta": 5000.0}


@pytest.mark.parametrize("changes", [{}, SAVED | {"num_key_value_heads": 2}])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_reads_as_transformers_reads_it(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """What it leaves out has the defaults, in our file and in the one that transformers saves."""
    given = {name: value for name, value in LLAMA.items() if name not in ("model_type", "num_key_value_heads")}
    given |= {"num_attention_heads": 32, "hidden_size": 256} | changes
    config = CONFIGS[kind](**given)
    config.save_pretrained(tmp_path)
    for document in (given | {"model_type": kind}, json.loads((tmp_path / "config.json").read_text())):
        found = read_architecture(document)
        assert found is not None
        assert (found.context, found.norm_eps) == (config.max_position_embeddings, config.rms_norm_eps)
        assert (found.is_tied, found.kv_heads) == (config.tie_word_embeddings, config.num_key_value_heads)
        assert found.head_size == (getattr(config, "head_dim", None) or 8)
        older = getattr(config, "rope_theta", None)
        assert found.rotation.theta == (older or config.rope_parameters["rope_theta"])
        assert all(getattr(found, name) == value for name, value in (("kv_heads", 2), ("context", 77)) if changes)
    assert config.hidden_act == COMMON["hidden_act"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        (SLIDING | {"model_type": "qwen2", "max_window_layers": 1}, (None, 5)),
        (SLIDING | {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]}, (5, None)),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    found = read_architecture(LLAMA | changes)
    assert found is not None
    assert found.windows == windows


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2"},
        {"model_type": None},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"hidden_size": None},
        {"hidden_size": "32"},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": "2"},
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
        {"model_type": "qwen3", "layer_types": ["full_attention"]},
    ],
)
def test_all_else_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert read_architecture(LLAMA) is not None
    assert read_architecture(LLAMA | changes) is None


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.5},
        {"type": "linear", "factor": 2.5},
        pytest.param(
            LLAMA3,
            marks=pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 wants the old length"),
        ),
        LLAMA3 | {"original_max_position_embeddings": 64},
        YARN,
        YARN | {"attention_factor": 1.3},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    ],
)
def test_angles_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 512, "rope_theta": 20_000.0}
    config = LlamaConfig(**sizes, rope_scaling=None if scaling is None else dict(scaling))
    embedding = LlamaRotaryEmbedding(config)
    rotation = Rotation.of(sizes | {"rope_scaling": scaling})
    assert rotation is not None
    frequencies_P, magnitude = rotation.frequencies(64)
    torch.testing.assert_close(frequencies_P, embedding.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(embedding.attention_scaling)
