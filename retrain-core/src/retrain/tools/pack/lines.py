"""The record of a run, step by step, in the form in which two runs can be the same: without times.

A step's line has every field of `metrics.jsonl` but the times, the checksum of its token file (ids, log-probabilities
and credit of every action token), and the checksum of its evaluations in `eval.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.records.files import digest_of, new_digest
from retrain.records.reading import TIMED, Record, damaged, parse_record
from retrain.records.record_names import EVALUATION, METRICS, token_file

TOKENS, EVALUATED = "(tokens)", "(evaluation)"  # fields that are checksums; no metric has such a name
Line = Mapping[str, Any]
MOST_FIELDS = 5
SHOWN_FIRST = ("loss", "correct_rate", "mean_reward", "eval_correct_rate")


@dataclass(slots=True)
class RunLines:
    """Reads the lines of a run folder as they come; each call of `new` continues where the last one ended."""

    run: Path
    _places: dict[str, int] = field(default_factory=dict)
    _evaluations: dict[int, Any] = field(default_factory=dict)

    def new(self) -> Iterator[Line]:
        """Yield the lines that are complete by now and were not given yet; ConfigError for a damaged one."""
        for record in self._complete(METRICS):
            line = {name: value for name, value in record.items() if not name.endswith(TIMED)}
            step = record.get("step")
            if type(step) is not int:
                raise damaged(str(self.run / METRICS), "a line has no step")
            for evaluated in self._complete(EVALUATION):
                digest = self._evaluations.setdefault(evaluated.get("step", 0), new_digest())
                digest.update(json.dumps(evaluated, sort_keys=True).encode())
            if step in self._evaluations:
                line[EVALUATED] = self._evaluations.pop(step).hexdigest()
            with suppress(OSError):
                line[TOKENS] = digest_of(token_file(self.run, step)).hexdigest()
            yield line

    def _complete(self, name: str) -> Iterator[Record]:
        """Yield every further line of a file that ends with a line break."""
        try:
            with open_regular(self.run / name) as stream:
                stream.seek(self._places.get(name, 0))
                for text in stream:
                    if not text.endswith(b"\n"):
                        return
                    self._places[name] = self._places.get(name, 0) + len(text)
                    yield parse_record(text)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise damaged(str(self.run / name), str(error)) from error


def encoded(line: Line) -> bytes:
    return (json.dumps(line, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first line in which a rerun differs from the run: its step, and both values of every differing field.

    A value is None where a side does not have the field. `missing` says that a side has no line of the step at all.
    """

    run: str
    step: int
    fields: Mapping[str, tuple[Any, Any]]
    missing: str = ""

    @property
    def is_rounding(self) -> bool:
        """True if only numbers differ, each by less than 0.1 %: the effect of other kernels on the same run."""
        pairs = [pair for name, pair in self.fields.items() if name not in (TOKENS, EVALUATED)]
        return bool(pairs) and not self.missing and all(_is_close(*pair) for pair in pairs)

    def as_data(self) -> dict[str, Any]:
        fields = {name: {"pack": pair[0], "rerun": pair[1]} for name, pair in self.fields.items()}
        return {"run": self.run, "step": self.step, "fields": fields, "missing": self.missing}

    def lines(self) -> list[str]:
        """Return the step, then both values of a few fields, loss and rates first."""
        where = "the evaluation before training" if self.step < 0 else f"step {self.step}"
        head = f"first divergence: {where}" + (f" of {self.run}" if self.run else "")
        if self.missing:
            return [f"{head}: {self.missing}"]
        shown = sorted(self.fields.items(), key=lambda item: item[0] not in SHOWN_FIRST)
        rows = [f"  {name}: {json.dumps(old)} in the pack, {json.dumps(new)} here" for name, (old, new) in shown]
        more = [f"  and {len(rows) - MOST_FIELDS} more fields"] if len(rows) > MOST_FIELDS else []
        return [f"{head}, {len(rows)} {'field' if len(rows) == 1 else 'fields'}", *rows[:MOST_FIELDS], *more]


def divergence(run: str, packed: Line | None, here: Line | None) -> Divergence | None:
    """Return the difference of two lines of a run; None when they are the same. A line of None: that side has ended."""
    if packed is None or here is None:
        line = packed or here
        side = "the rerun has no such line" if here is None else "the pack has no such line"
        return Divergence(run=run, step=line["step"], fields={}, missing=side) if line else None
    if packed == here:
        return None
    names = [*packed, *(name for name in here if name not in packed)]
    differing = {name: (packed.get(name), here.get(name)) for name in names if packed.get(name) != here.get(name)}
    step = packed["step"] if type(packed.get("step")) is int else here["step"]
    return Divergence(run=run, step=step, fields=differing)


def _is_close(old: Any, new: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (old, new))
    return numbers and abs(old - new) <= 1e-3 * max(abs(old), abs(new), 1e-6)
