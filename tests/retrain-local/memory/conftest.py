"""Models of known size, as folders with a `config.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain_local.memory.shape import ModelShape, read_shape
from tests.kit.model_configs import QWEN3_4B, SMALL


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
