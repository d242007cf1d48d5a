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
    return lambda shape, **changes: qwen3_folder(
        tmp_path / f"{shape}-{len(list(tmp_path.iterdir()))}", shape, **changes
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return our own warnings, of a kernel that is not used or of memory that ran out; libraries have theirs."""
    return [record.getMessage() for record in caplog.records if record.name == "retrain"]
