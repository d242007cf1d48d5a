"""Files of tasks, and no hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not asked, be it reachable or not."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """`put("tasks.jsonl", rows)`: a JSONL file below the test's folder."""

    def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write
