"""Models of known size, as their `config.json` gives it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain_local.memory.shape import ModelShape, read_shape
from tests.kit.model_configs import QWEN3_4B, SMALL


@pytest.fixture
def make_shape(tmp_path: Path) -> Callable[[dict[str, Any]], ModelShape]:
    def make(document: dict[str, Any]) -> ModelShape:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(document))
        return read_shape(tmp_path / "model", where="")

    return make


@pytest.fixture
def small(make_shape: Callable[[dict[str, Any]], ModelShape]) -> ModelShape:
    return make_shape(SMALL)


@pytest.fixture
def qwen(make_shape: Callable[[dict[str, Any]], ModelShape]) -> ModelShape:
    return make_shape(QWEN3_4B)
