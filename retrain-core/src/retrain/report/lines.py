"""Streams `metrics.jsonl` of one run into columns and health episodes.

A campaign has half a million lines, a page a few hundred points per curve. So one line in `stride` is parsed, plus
every line with an evaluation or a health finding, and the last one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Floats
from retrain.records.reading import parse_record, parsed_lines
from retrain.records.runs.metric import eval_sets
from retrain.tasks.scoring.verdict import part_fields

EVAL_MARK, HEALTH_MARK = b'"eval_', b'"health": ['
PASS_PREFIX = "eval_pass_at_"
TAIL_BYTES = 1200  # at the end of a line: evaluation and health are its last fields
LARGEST = 1e100  # beyond anything that a run measures
STATE_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A health finding from its first step to its last."""

    state: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLines:
    """Rows of one run in order of steps, the evaluation before training as step -1.

    `columns` has an array per field that occurs, NaN where a row has no number; `steps_R` the step of each row.
    `problem` says where a damaged file ended the reading.
    """

    steps_R: Floats
    columns: Mapping[str, Floats]
    episodes: tuple[Episode, ...] = ()
    problem: str = ""

    def column(self, field: str) -> Floats:
        """The values of a field, all NaN when the run never has it."""
        found = self.columns.get(field)
        return np.full(self.steps_R.size, math.nan) if found is None else found

    def mean(self, field: str) -> float | None:
        """Mean over the rows that have it."""
        values_R = self.column(field)
        values_R = values_R[np.isfinite(values_R)]
        return float(values_R.mean()) if values_R.size else None


NO_LINES = RunLines(steps_R=np.zeros(0), columns={})


def read_lines(file: Path, fields: Sequence[str], *, stride: int) -> RunLines:
    """`fields`, every `eval_pass_at_*` and the reward's parts of one line in `stride`.

    A last line that was cut by a kill is left out.
    """
    rows, problem = _Rows(fields, stride), ""
    try:
        for _ in parsed_lines(file, rows.take):
            pass
    except ConfigError as error:
        damage = error.problems[0]
        problem = f"{Path(damage.where).name}: {damage.what}"
    return rows.finished(problem)


class _Rows:
    """Columns that grow by a row per line."""

    def __init__(self, fields: Sequence[str], stride: int) -> None:
        self._fields = tuple(dict.fromkeys(fields))
        self._stride = stride
        self._num_lines = 0
        self._skipped = b""
        self._steps = array("d")
        self._columns = [array("d") for _ in self._fields]
        self._appends = [(field, column.append) for field, column in zip(self._fields, self._columns, strict=True)]
        self._parts: tuple[str, ...] | None = None  # of the reward, as the first step names them
        self._named: dict[str, dict[int, float]] = {}
        self._open: dict[str, list[int]] = {}
        self._episodes: list[Episode] = []

    def take(self, line: bytes) -> None:
        """Add the next line, unless it is skipped; ValueError if it is not the record of a later step."""
        is_rare = line.find(EVAL_MARK, -TAIL_BYTES) >= 0 or line.find(HEALTH_MARK, -TAIL_BYTES) >= 0
        is_skipped = self._num_lines % self._stride > 0 and not is_rare
        self._num_lines += 1
        self._skipped = line if is_skipped else b""
        if not is_skipped:
            self._add(line)

    def _add(self, line: bytes) -> None:
        record = parse_record(line, allow_nan=True, allow_overflow=True)
        step = record.get("step")
        if type(step) is not int or (self._steps and step <= self._steps[-1]):
            raise ValueError("no step, or not a later one")
        for field, append in self._appends:
            value = record.get(field)
            append(value if type(value) is float and -LARGEST < value < LARGEST else _number(value))
        if self._parts is None and step >= 0:
            self._parts = tuple(part_fields(record).values())
        names = self._parts or ()
        if "eval_time_s" in record or "eval_correct_rate" in record:
            passes = [name for name in record if name.startswith(PASS_PREFIX)]
            names = (*names, *passes, *part_fields(record, "eval_").values(), *eval_sets(record).values())
        for name in names:
            self._named.setdefault(name, {})[len(self._steps)] = _number(record.get(name))
        self._steps.append(step)
        self._note_health(step, record.get("health"))

    def finished(self, problem: str) -> RunLines:
        """All rows, including the last line even if it was skipped, because the curve ends there."""
        if self._skipped and not problem:
            with suppress(ValueError, RecursionError):  # cut by a kill
                self._add(self._skipped)
        self._close(list(self._open))
        columns = {field: np.array(column) for field, column in zip(self._fields, self._columns, strict=True)}
        for name, values in self._named.items():
            columns[name] = np.full(len(self._steps), math.nan)
            columns[name][list(values)] = list(values.values())
        kept = {field: column for field, column in columns.items() if np.isfinite(column).any()}
        episodes = tuple(sorted(self._episodes, key=lambda each: each.first_step))
        return RunLines(steps_R=np.array(self._steps), columns=kept, episodes=episodes, problem=problem)

    def _note_health(self, step: int, states: object) -> None:
        """An episode ends with the first parsed step without it; steps with one are never skipped."""
        found = {str(state)[:STATE_CHARS] for state in states} if isinstance(states, list) else set()
        ended = [state for state, span in self._open.items() if state not in found or step > span[1] + 1]
        self._close(ended)
        for state in found:
            self._open.setdefault(state, [step, step])[1] = step

    def _close(self, states: Sequence[str]) -> None:
        for state in states:
            first, last = self._open.pop(state)
            self._episodes.append(Episode(state=state, first_step=first, last_step=last))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if abs(value) < LARGEST else math.nan  # NaN is not below it either
    except OverflowError:
        return math.nan
