"""A model of known size, as a folder with a `config.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.model_configs import QWEN3_4B


@pytest.fixture
def qwen_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    return folder
