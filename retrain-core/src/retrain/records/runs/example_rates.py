"""Reads from `eval.jsonl` what every held-out example of a run scored at one evaluation, without reading the rest."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.types import Floats
from retrain.records.reading import Record, number, parse_record
from retrain.records.record_names import EVALUATION
from retrain.records.runs.metric import Metric, Summary

HELD_OUT_SET = "held_out"
_FIELD = re.compile(r"eval_(?:(?P<set>\w+?)_)?(?P<kind>correct_rate|mean_reward|pass_at_(?P<k>[1-9]\d*))")
_STEP = re.compile(rb'\{"step": (-?\d+),')
_TOLERANCE = 1e-9  # between a rate in metrics.jsonl and the mean over examples


class NoExamplesError(Exception):
    """There is nothing per example to compare; the text says why, as the end of a sentence."""


class OtherExamplesError(NoExamplesError):
    """Two runs were evaluated on different examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerExample:
    """Which figure of each example a metric is the mean of: `kind` of the set `name`, for pass@k with its `k`."""

    name: str
    kind: str
    k: int

    def of(self, record: Record) -> float:
        """The figure of one line; ValueError where the line does not have it."""
        if self.kind == "mean_reward":
            scores = [number(score) for score in record["scores"]]
            if not scores or (found := [score for score in scores if score is not None]) != scores:
                raise ValueError("some samples have no score")
            return math.fsum(found) / len(found)
        correct = record["correct"]
        if not isinstance(correct, list) or not correct or not all(isinstance(each, bool) for each in correct):
            raise ValueError("there is no list of what is correct")
        right, samples = sum(correct), len(correct)
        if not self.k:
            return right / samples
        if self.k > samples:
            raise ValueError(f"pass@{self.k} of {samples} samples")
        return 1.0 - math.comb(samples - right, self.k) / math.comb(samples, self.k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExampleRates:
    """One run at one evaluation: ids, clusters and figures of the examples of a set, in the order of the file.

    `lines` is how many examples the run scored at that evaluation, those of other sets too.
    """

    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    values_E: Floats
    lines: int


def per_example(metric: Metric) -> PerExample:
    """What `metric` is the mean of; NoExamplesError unless it is a rate or a reward of one evaluation."""
    found = _FIELD.fullmatch(metric.field)
    if not found:
        raise NoExamplesError(f"{metric.field} is not a mean over held-out examples")
    if metric.summary is not Summary.FINAL:
        raise NoExamplesError(f"{metric} is not about one evaluation: only `final` is")
    return PerExample(name=found["set"] or HELD_OUT_SET, kind=found["kind"], k=int(found["k"] or 0))


def read_rates(folder: Path, figure: PerExample, *, step: int, expected: float) -> ExampleRates:
    """The examples of a set after a step; NoExamplesError where they are absent, damaged, or not those of `expected`.

    The lines of a file are in the order of steps: those of one step are found by bisection, and nothing else is read.
    """
    ids, clusters, values, lines = [], [], [], 0
    try:
        for record in _records(folder / EVALUATION, step):
            lines += 1
            if record.get("set") == figure.name:
                ids.append(_text(record, "example"))
                clusters.append(_text(record, "cluster"))
                values.append(figure.of(record))
    except FileNotFoundError:
        raise NoExamplesError(f"{folder.name} has no {EVALUATION}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise NoExamplesError(f"{EVALUATION} of {folder.name} cannot be read at step {step}: {reason}") from error
    if not values:
        raise NoExamplesError(f"{EVALUATION} of {folder.name} has nothing about step {step}")
    values_E = np.array(values)
    if not abs(float(values_E.mean()) - expected) <= _TOLERANCE * max(1.0, abs(expected)):
        told = f"{EVALUATION} of {folder.name} gives {float(values_E.mean()):.6g} at step {step}"
        raise NoExamplesError(f"{told}, metrics.jsonl {expected:.6g}")
    return ExampleRates(ids=tuple(ids), clusters=tuple(clusters), values_E=values_E, lines=lines)


def aligned(found: Sequence[tuple[str, ExampleRates]]) -> Floats:
    """The figures of several runs, (runs, examples), in the order of the first; NoExamplesError if they differ."""
    name, first = found[0]
    rows = []
    for other, rates in found:
        if rates.ids == first.ids and rates.clusters == first.clusters:
            rows.append(rates.values_E)
            continue
        place = {example: index for index, example in enumerate(rates.ids)}
        theirs, ours = set(rates.ids), set(first.ids)
        if theirs != ours or not len(rates.ids) == len(first.ids) == len(place):
            told = f"{other} was evaluated on {len(rates.ids)} examples and {name} on {len(first.ids)}"
            raise OtherExamplesError(f"{told}, {len(theirs & ours)} of them the same")
        order = [place[example] for example in first.ids]
        if tuple(rates.clusters[index] for index in order) != first.clusters:
            raise NoExamplesError(f"{other} groups the examples into other clusters than {name}")
        rows.append(rates.values_E[order])
    return np.stack(rows)


def _records(file: Path, step: int) -> Iterator[Record]:
    with open_regular(file) as stream:
        stream.seek(_first_of(stream, step))
        for line in stream:
            if not line.endswith(b"\n"):  # cut short by a kill
                return
            if (found := _step_of(line)) != step:
                if found < step:
                    raise ValueError(f"step {found} comes after step {step}")
                return
            yield parse_record(line)


def _first_of(stream: BinaryIO, step: int) -> int:
    """Where the first line of a step, or of a later one, begins; the end if there is none."""
    low, high = 0, os.fstat(stream.fileno()).st_size
    while low < high:
        middle = (low + high) // 2
        stream.seek(max(0, middle - 1))
        if middle:
            stream.readline()
        line = stream.readline()
        if line.endswith(b"\n") and _step_of(line) < step:
            low = stream.tell()
        else:
            high = middle
    return low


def _step_of(line: bytes) -> int:
    found = _STEP.match(line)
    step = int(found[1]) if found else parse_record(line).get("step")
    if type(step) is not int:
        raise ValueError("the line has no step")
    return step


def _text(record: Record, key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is no text")
    return value
