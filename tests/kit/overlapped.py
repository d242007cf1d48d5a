"""What a run of the toys leaves, read back for comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GENERATIONS = "emergence/generations.jsonl"


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps, without the evaluation before training."""
    return [line for line in lines(folder) if line["step"] >= 0]


def outcome(folder: Path) -> tuple[Any, ...]:
    """All that a run leaves, time apart."""
    untimed = [{k: v for k, v in line.items() if not k.endswith("time_s")} for line in lines(folder)]
    final = (folder / "adapter/final/logits.json").read_bytes()
    return untimed, lines(folder, GENERATIONS), lines(folder, "emergence/steps.jsonl"), final
