"""Files of tasks, and no hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from retrain.cli.start import first_run
from retrain.cli.start.first_run import Speed
from retrain.kernel.types import Tokens


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fast machine, whose `speed` a test may replace, be it by an error; nothing is measured."""
    found = SimpleNamespace(
        speed=Speed(prefill_s=1e-3, decode_s=1e-3, sample_s=1e-4, train_s=1e-4, start_s=5.0, prompt_tokens=20)
    )

    def measured(_file: Path, _prompts_PT: Sequence[Tokens]) -> Speed:
        if isinstance(found.speed, Exception):
            raise found.speed
        return cast(Speed, found.speed)

    monkeypatch.setattr(first_run, "measured_speed", measured)
    return found


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
