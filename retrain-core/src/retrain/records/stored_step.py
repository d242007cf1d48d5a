"""Reads a step of a run back: its line, and its completions with their tokens, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import Record, parse_record, parsed_lines, read_steps
from retrain.records.record_names import GENERATIONS, METRICS
from retrain.records.tokens import TokenRecord, read_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCompletion:
    """One completion: its line of `generations.jsonl` and its tokens."""

    record: Mapping[str, Any]
    tokens: TokenRecord

    @property
    def reward(self) -> float | None:
        """The reward that credit was assigned to; None without a verdict, or when that was dropped."""
        reward: float | None = self.record.get("shaped_reward", self.record["reward"])
        return reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredStep:
    """A step of a run: its metrics line, and its completions by group."""

    step: int
    metrics: Mapping[str, Any]
    groups: tuple[tuple[StoredCompletion, ...], ...]


def read_step(run: Path, step: int | None) -> StoredStep:
    """A step of a run, the last one by default. Files are streamed."""
    metrics = _metrics_line(run, step)
    chosen = int(metrics["step"])
    tokens = read_tokens(run, chosen)
    records = _generation_lines(run / GENERATIONS, chosen)
    if len(records) != len(tokens):
        what = f"step {chosen} has {len(records)} completions but {len(tokens)} token records"
        raise ConfigError(Problem(where=str(run), what=what, fix="choose another --step"))
    by_group: dict[int, list[StoredCompletion]] = {}
    for record, record_tokens in zip(records, tokens, strict=True):
        by_group.setdefault(record["group"], []).append(StoredCompletion(record=record, tokens=record_tokens))
    return StoredStep(step=chosen, metrics=metrics, groups=tuple(tuple(group) for group in by_group.values()))


def _metrics_line(run: Path, step: int | None) -> Mapping[str, Any]:
    file = run / METRICS
    found: Mapping[str, Any] | None = None
    for number, record in read_steps(file):
        if number >= 0 and (step is None or number == step):
            found = record
    if found is None:
        what = "holds no step" if step is None else f"holds no step {step}"
        raise ConfigError(Problem(where=str(file), what=what, fix="choose another --step"))
    return found


def _generation_lines(file: Path, step: int) -> list[Record]:
    mark = f'{{"step": {step},'.encode()  # the first field of each line: only this step's lines are parsed
    lines = parsed_lines(file, lambda line: parse_record(line) if line.startswith(mark) else None)
    return [record for _, record in lines if record is not None]
