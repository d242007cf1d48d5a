"""The toys with a reward that needs no process, which is most of what a short evaluation costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PARTS = """
from retrain.api import Example, LoadedData, PluginSpec, Score, hookimpl

class Near:
    def __init__(self, context):
        pass

    async def score(self, example, text):
        return Score.of(float(text.split()[:1] == [example.reference]))

class Always:
    async def score(self, example, text):
        return Score.of(1.0)

class Own:
    def __init__(self, context):
        pass

    def load(self):
        examples = tuple(Example(id=f"own-{n}", prompt=f"ok {n} ?", reference="no") for n in range(2))
        return LoadedData(examples=examples, reward=Always())

@hookimpl
def retrain_register_rewards(register):
    register(PluginSpec(name="near", summary="First word, in the run's process.", factory=Near))

@hookimpl
def retrain_register_data_sources(register):
    register(PluginSpec(name="own", summary="Brings a verifier.", factory=Own))
"""
WORDS = [{"q": f"so {n} ?", "a": str(n), "book": f"b{n % 2}"} for n in range(3)] + [{"q": "ok ?", "a": "1"}]


@pytest.fixture
def near_arguments(toy_arguments: list[str], distribution: Callable[..., Path], tmp_path: Path) -> list[str]:
    """`toy_arguments` with that reward; words.jsonl lies in the folder."""
    distribution("retrain-near", {"near_parts": PARTS})
    (tmp_path / "words.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in WORDS), encoding="utf-8")
    at = toy_arguments.index("--reward-type") + 1
    return [*toy_arguments[:at], "near", *toy_arguments[at + 1 :]]


@pytest.fixture
def lines() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads the records of a JSONL file."""
    return lambda file: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
