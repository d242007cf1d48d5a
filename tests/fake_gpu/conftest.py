"""Folders of models, and a skip for processes without the guard: `nox -s fake-gpu` builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.kit.fake_gpu.build_guard import is_guarded
from tests.kit.fake_gpu.models import qwen3_folder


class MakeFolder(Protocol):
    """Returns the folder of a Qwen3 of these sizes, with changes to its config.json."""

    def __call__(self, shape: str, **changes: Any) -> Path: ...


@pytest.fixture(autouse=True)
def _guarded() -> None:
    if not is_guarded():
        pytest.skip("no guard for the fake GPU is loaded: `nox -s fake-gpu` builds one")


@pytest.fixture
def qwen3(tmp_path: Path) -> MakeFolder:
    return lambda shape, **changes: qwen3_folder(tmp_path / f"qwen3-{shape}", shape, **changes)
