"""Reads the few fields that a comparison needs from `metrics.jsonl`, line by line.

A line has some sixty fields of which a handful is needed, and a campaign half a million lines: the fields are looked
up in the bytes of the line, and only an ambiguous line is parsed as JSON.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.reading import damaged, number, parse_record, parsed_lines
from retrain.records.runs.metric import EVAL_PREFIX, HELD_OUT, HELD_OUT_REWARD, PASS_PREFIX

TOKENS, SECONDS = "sampled_tokens", "step_time_s"
EVAL_KEPT = frozenset({HELD_OUT.field, HELD_OUT_REWARD.field, "eval_examples", "eval_samples"})
_EVAL = re.compile(rb'[{ ]"(eval_\w+)": (-?[0-9][0-9.eE+-]*)(?=[,}])')
_EVAL_MARK = b'"eval_'
_STEP = b'"step"'
_NAN = math.nan
LARGEST = 1e100  # beyond anything that a run measures; larger values overflow variances


class _UnclearError(Exception):
    """The bytes are ambiguous; the line must be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Rows of one run in order of steps, the evaluation before training as step -1.

    `values` has an array per field that occurs, of one number per row, NaN if missing.
    """

    steps_R: Floats
    values: Mapping[str, Floats]

    @property
    def num_steps(self) -> int:
        """Finished steps: one more than the last step."""
        return max(0, int(self.steps_R[-1]) + 1) if self.steps_R.size else 0

    def column(self, field: str) -> Floats:
        """The values of a field; all NaN if the run never has it."""
        found = self.values.get(field)
        return np.full(self.steps_R.size, _NAN) if found is None else found

    def has(self, field: str) -> bool:
        """Whether any row has a number in this field."""
        return field in self.values and bool(np.isfinite(self.values[field]).any())


def read_curves(file: Path, fields: Collection[str]) -> Curves:
    """`fields` and the held-out results of each line; ConfigError names the first damaged line.

    A last line that was cut short by a kill is left out. A field that is null, text, beyond 1e100 or absent is NaN in
    its row; the text NaN is damage. Other fields are ignored.
    """
    lookup = _FieldLookup(fields)
    steps, columns = array("d"), [array("d") for _ in lookup.needles]
    evaluations: list[tuple[int, Mapping[str, float]]] = []
    before = -math.inf
    for line_number, (step, values, evaluation) in parsed_lines(file, lookup.of):
        if not step > before:
            raise damaged(f"{file}:{line_number}", f"step {step:.0f} comes after step {before:.0f}")
        if evaluation:
            evaluations.append((len(steps), evaluation))
        before = step
        steps.append(step)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    arrays = {name: np.array(column) for name, column in zip(lookup.names, columns, strict=True)}
    arrays |= _sparse(evaluations, len(steps))
    return Curves(steps_R=np.array(steps), values={name: a for name, a in arrays.items() if np.isfinite(a).any()})


def _sparse(rows: Sequence[tuple[int, Mapping[str, float]]], num_rows: int) -> dict[str, Floats]:
    """Columns of fields that only a few rows have."""
    columns: dict[str, Floats] = {}
    for index, values in rows:
        for name, value in values.items():
            if name not in columns:
                columns[name] = np.full(num_rows, _NAN)
            columns[name][index] = value
    return columns


class _FieldLookup:
    """Looks up fields in each line; evaluation fields as a group, since few lines have any."""

    def __init__(self, fields: Collection[str]) -> None:
        self.names = tuple(name for name in dict.fromkeys(fields) if not name.startswith(EVAL_PREFIX))
        self.needles = tuple(json.dumps(name).encode() for name in self.names)
        self._kept = EVAL_KEPT.union(fields)

    def of(self, line: bytes) -> tuple[float, list[float], Mapping[str, float]]:
        """Step, value of each name, held-out results. ValueError if the line is not a step of a run."""
        try:
            # A truncated line may look complete, and a nested object may repeat a field: parse both.
            if not line.endswith(b"}\n") or line[:1] != b"{" or line.find(b"{", 1) > 0:
                raise _UnclearError
            step = _look_up(line, _STEP)
            values = [_look_up(line, needle) for needle in self.needles]
            start = line.find(_EVAL_MARK)
            evaluation: Mapping[str, float] = self._evaluation(line, start) if start >= 0 else {}
        except _UnclearError:
            step, values, evaluation = self._parsed(line)
        if not step.is_integer():
            raise ValueError("the line has no step")
        return step, values, evaluation

    def _evaluation(self, line: bytes, start: int) -> dict[str, float]:
        found = _EVAL.findall(line, start - 1)
        if len(found) != line.count(_EVAL_MARK, start):
            raise _UnclearError
        values = {field: float(digits) for name, digits in found if self._is_kept(field := name.decode())}
        if not all(abs(value) <= LARGEST for value in values.values()):
            raise _UnclearError
        return values

    def _parsed(self, line: bytes) -> tuple[float, list[float], Mapping[str, float]]:
        record = parse_record(line, allow_overflow=True)
        values = [_number(record.get(name)) for name in self.names]
        kept = (name for name in record if self._is_kept(name) and name.startswith(EVAL_PREFIX))
        evaluation = {name: value for name in kept if math.isfinite(value := _number(record[name]))}
        return _number(record.get("step")), values, evaluation

    def _is_kept(self, name: str) -> bool:
        return name in self._kept or name.startswith(PASS_PREFIX)


def _look_up(line: bytes, needle: bytes) -> float:
    at = line.find(needle)
    if at < 0:
        return _NAN
    start = at + len(needle) + 2
    if line[start - 2 : start] != b": " or (line[at - 2 : at] != b", " and at != 1):
        raise _UnclearError
    end = line.find(b",", start)
    try:
        value = float(line[start : end if end >= 0 else line.rfind(b"}")])
    except ValueError:
        raise _UnclearError from None
    if not abs(value) <= LARGEST:  # NaN too
        raise _UnclearError
    return value


def _number(value: object) -> float:
    found = number(value)
    return _NAN if found is None or abs(found) > LARGEST else float(found)
