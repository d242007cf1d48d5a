"""Reads the fields of a comparison from `metrics.jsonl`, as arrays over the steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic_core import from_json

from retrain.kernel.types import Floats
from retrain.records.reading import Record, damaged, number, parse_record, parsed_lines
from retrain.records.runs.metric import HELD_OUT, HELD_OUT_REWARD, PASS_PREFIX

TOKENS, SECONDS = "sampled_tokens", "step_time_s"
EVAL_KEPT = frozenset({HELD_OUT.field, HELD_OUT_REWARD.field, "eval_examples", "eval_samples"})
LARGEST = 1e100  # beyond anything that a run measures; larger values overflow variances


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Rows of one run in order of steps, the evaluation before training as step -1.

    `values` has an array per field that occurs, with one number per row, NaN if missing.
    """

    steps_R: Floats
    values: Mapping[str, Floats]

    @property
    def num_steps(self) -> int:
        return max(0, int(self.steps_R[-1]) + 1) if self.steps_R.size else 0

    def column(self, field: str) -> Floats:
        """Return the values of a field; all NaN if the run never has it."""
        found = self.values.get(field)
        return np.full(self.steps_R.size, math.nan) if found is None else found

    def has(self, field: str) -> bool:
        return field in self.values and bool(np.isfinite(self.values[field]).any())


def read_curves(file: Path, fields: Collection[str]) -> Curves:
    """Read `fields` and the held-out results of each line; ConfigError names the first damaged line.

    A truncated last line is skipped. A field that is null, text, beyond 1e100 or absent is NaN in its row; the text NaN
    is damage.
    """
    steps: list[float] = []
    columns: dict[str, dict[int, float]] = {}  # by field: row -> value
    for line_number, record in parsed_lines(file, _step_record):
        step = _number(record["step"])
        if steps and not step > steps[-1]:
            raise damaged(f"{file}:{line_number}", f"step {step:.0f} comes after step {steps[-1]:.0f}")
        evaluated = [name for name in record if name in EVAL_KEPT or name.startswith(PASS_PREFIX)]
        for name in (*evaluated, *fields):
            if math.isfinite(value := _number(record.get(name))):
                columns.setdefault(name, {})[len(steps)] = value
        steps.append(step)
    values = {name: np.full(len(steps), math.nan) for name in columns}
    for name, found in columns.items():
        values[name][list(found)] = list(found.values())
    return Curves(steps_R=np.array(steps), values=values)


def _step_record(line: bytes) -> Record:
    """Return the record of a line that has a step; a campaign has half a million lines, and `from_json` is fast."""
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError:
        value = None
    record: Record = value if isinstance(value, dict) else parse_record(line, allow_overflow=True)  # says what is wrong
    if not _number(record.get("step")).is_integer():
        raise ValueError("the line has no step")
    return record


def _number(value: object) -> float:
    found = number(value)
    return math.nan if found is None or abs(found) > LARGEST else float(found)
