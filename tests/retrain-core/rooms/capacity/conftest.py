"""Models of known size, as folders with a `config.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.rooms.capacity.shape import ModelShape, read_shape

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
}
SMALL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """`make_model(SMALL, hidden_size=9)`: a folder with that `config.json`."""

    def make(base: dict[str, Any], **changes: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(base | changes))
        return folder

    return make


@pytest.fixture
def small(make_model: Callable[..., Path]) -> ModelShape:
    return read_shape(make_model(SMALL), where="")


@pytest.fixture
def qwen_folder(make_model: Callable[..., Path]) -> Path:
    return make_model(QWEN3_4B)


@pytest.fixture
def qwen(qwen_folder: Path) -> ModelShape:
    return read_shape(qwen_folder, where="")
