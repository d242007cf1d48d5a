"""Sizes from `config.json`: counts by hand, counts against real files, and files that are no configuration."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import ConfigError
from retrain_local.memory.shape import ModelShape, count_parameters, read_shape, shape_of
from tests.kit.problems import codes_in

TINY = Path(__file__).parents[3] / "retrain-local/src/retrain_local/tiny"
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}


def write_header(file: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_small_model_counted_by_hand_and_a_model_of_4b_as_published(small: ModelShape, qwen: ModelShape) -> None:
    # q 8x8, k and v 8x4, o 8x8, gate, up, down 8x16: per block 64 + 32 + 32 + 64 + 3 * 128 = 576
    assert small.adapted_elements == 2 * 576
    # two embeddings of 10 x 8, five norms of 8
    assert small.parameters == 2 * 80 + 2 * 576 + 40
    # rank 3: 3 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 16)) per block
    assert small.lora_parameters(3) == 2 * 3 * (16 + 24 + 16 + 72)
    assert not small.is_counted
    assert qwen.lora_parameters(32) == 66_060_288
    assert qwen.parameters == pytest.approx(4_022_468_096, rel=1e-4)


def test_the_built_in_model_is_counted_in_its_file_and_the_formula_agrees() -> None:
    shape = read_shape(TINY, where="")
    assert shape.is_counted
    document = json.loads((TINY / "config.json").read_text())
    by_formula = shape_of(document, file=TINY, where="")
    assert by_formula.parameters == pytest.approx(shape.parameters, rel=1e-3)
    assert shape.lora_parameters(16) == 116_736
    assert shape.context == 1024


def test_older_names_are_understood() -> None:
    shape = shape_of(GPT2, file=Path("config.json"), where="")
    assert (shape.layers, shape.inner, shape.kv_heads, shape.head_size) == (12, 3072, 12, 64)
    assert not shape.has_gate
    assert shape.adapted_elements == 12 * (4 * 768**2 + 2 * 768 * 3072)


def test_a_sampler_that_does_not_merge_has_one_product_for_layers_with_one_input(small: ModelShape) -> None:
    parts = ((8 + 16) * 3, 8 + 8, (8 + 2 * 16) * 2, 16 + 8)  # queries, keys and values; output; gate and up; down
    assert small.sampler_adapter_elements(4) == 4 * 2 * sum(parts)
    experts = shape_of({**SMALL, "num_experts": 4, "num_experts_per_tok": 2}, file=Path("c"), where="")
    assert experts.sampler_adapter_elements(4) == experts.lora_parameters(4)
    assert (experts.active_experts, small.active_experts) == (2, 1)
    shape = shape_of({**SMALL, "num_experts": 4, "moe_intermediate_size": 6}, file=Path("c"), where="")
    assert (shape.experts, shape.adapted_elements) == (4, 2 * (4 * 64 + 4 * 3 * 8 * 6)), "each expert is counted"
    assert small.is_native
    assert not shape_of({**SMALL, "model_type": "gemma2"}, file=Path("c"), where="").is_native


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((text, "bad-config-json") for text in ("", "[]", "[" * 100_000, '{"text_config": 3}', "\ud800", None)),
        ("{}", "unknown-sizes"),
        *((json.dumps({**SMALL, "hidden_size": value}), "bad-size") for value in (-1, 0, "8", True, 10**30)),
        (json.dumps({**SMALL, "num_attention_heads": 100}), "bad-size"),
    ],
)
def test_an_impossible_configuration_is_refused_by_file_and_key(text: str | None, code: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        read_shape(tmp_path, where="retrain.toml:2 [model] model")
    assert codes_in(caught) == [f"model.{code}"]
    assert "config.json" in str(caught.value)
    assert "retrain.toml:2" in str(caught.value)


def test_shards_are_added_up_and_damaged_ones_are_not_counted(tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "x": {"shape": [3, 4]}})
    write_header(tmp_path / "b.safetensors", {"y": {"shape": []}, "z": {"shape": [5]}})
    assert count_parameters(tmp_path) == 12 + 1 + 5
    write_header(tmp_path / "c.safetensors", {"y": {"shape": "3"}})
    assert count_parameters(tmp_path) is None
    for content in (b"", b"\x00" * 8, b"\xff" * 40, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 4) + b"null"):
        (tmp_path / "c.safetensors").write_bytes(content)
        assert count_parameters(tmp_path) is None


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_of_a_size_is_a_shape_or_an_error(value: Any) -> None:
    def attempt(make: Callable[[], ModelShape]) -> None:
        with suppress(ConfigError):
            assert make().parameters > 0

    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "num_experts"):
        attempt(lambda key=key: shape_of({**SMALL, key: value}, file=Path("c"), where=""))  # type: ignore[misc]
