"""Reads the scores of every held-out example of a run at one evaluation from `eval.jsonl`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Floats
from retrain.records.reading import Record, number, parse_record, parsed_lines
from retrain.records.record_names import EVALUATION
from retrain.records.runs.curves import Metric, Summary

HELD_OUT_SET = "held_out"
_FIELD = re.compile(r"eval_(?:(?P<set>\w+?)_)?(?P<kind>correct_rate|mean_reward|pass_at_(?P<k>[1-9]\d*))")
_STEP = '{"step": '
# Between a rate in metrics.jsonl and the mean over examples: sums of the same numbers, added up in another order.
_TOLERANCE = 1e-9


class NoExamplesError(Exception):
    """There is nothing per example to compare; the text is the reason, as the end of a sentence."""


class OtherExamplesError(NoExamplesError):
    """Two runs were evaluated on different examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerExample:
    """The figure of each example whose mean is a metric: `kind` of the set `name`, for pass@k with its `k`."""

    name: str
    kind: str
    k: int

    def of(self, record: Record) -> float:
        """Return the figure of one line; ValueError if the line does not have it."""
        if self.kind == "mean_reward":
            scores = [number(score) for score in record["scores"]]
            if not scores or (found := [score for score in scores if score is not None]) != scores:
                raise ValueError("some samples have no score")
            return math.fsum(found) / len(found)
        correct = record["correct"]
        if not isinstance(correct, list) or not correct or not all(isinstance(each, bool) for each in correct):
            raise ValueError("there is no list `correct`")
        right, samples = sum(correct), len(correct)
        if not self.k:
            return right / samples
        if self.k > samples:
            raise ValueError(f"pass@{self.k} of {samples} samples")
        # The unbiased estimate (Chen et al. 2021): k of the samples, drawn without replacement, are not all wrong.
        return 1.0 - math.comb(samples - right, self.k) / math.comb(samples, self.k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExampleRates:
    """The ids, clusters and figures of a set's examples in one run; `lines` counts the examples of all sets."""

    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    values_E: Floats
    lines: int


def per_example(metric: Metric) -> PerExample:
    """Return the figure whose mean is `metric`; NoExamplesError unless it is a rate or a reward of one evaluation."""
    found = _FIELD.fullmatch(metric.field)
    if not found:
        raise NoExamplesError(f"{metric.field} is not a mean over held-out examples")
    if metric.summary is not Summary.FINAL:
        raise NoExamplesError(f"{metric} is not about one evaluation: only `final` is")
    return PerExample(name=found["set"] or HELD_OUT_SET, kind=found["kind"], k=int(found["k"] or 0))


def read_rates(folder: Path, figure: PerExample, *, step: int, expected: float) -> ExampleRates:
    """Return the examples of a set after a step; NoExamplesError if absent, damaged, or without the mean `expected`."""
    ids, clusters, values, lines = [], [], [], 0
    if not (folder / EVALUATION).exists():
        raise NoExamplesError(f"{folder.name} has no {EVALUATION}")
    mark, other = f"{_STEP}{step},".encode(), _STEP.encode()

    def parse(line: bytes) -> Record | None:  # lines of other steps are recognised by the first field
        return parse_record(line) if line.startswith(mark) or not line.startswith(other) else None

    try:
        for _, record in parsed_lines(folder / EVALUATION, parse):
            if record is None:
                continue
            lines += 1
            if record.get("set") == figure.name:
                ids.append(_text(record, "example"))
                clusters.append(_text(record, "cluster"))
                values.append(figure.of(record))
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        reason = error.problems[0].what if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise NoExamplesError(f"{EVALUATION} of {folder.name} cannot be read at step {step}: {reason}") from error
    if not values:
        found = f"nothing of the set {figure.name}" if lines else "nothing"  # a mean over tasks is of no set
        raise NoExamplesError(f"{EVALUATION} of {folder.name} has {found} about step {step}")
    values_E = np.array(values)
    if not abs(float(values_E.mean()) - expected) <= _TOLERANCE * max(1.0, abs(expected)):
        told = f"{EVALUATION} of {folder.name} gives {float(values_E.mean()):.6g} at step {step}"
        raise NoExamplesError(f"{told}, metrics.jsonl {expected:.6g}")
    return ExampleRates(ids=tuple(ids), clusters=tuple(clusters), values_E=values_E, lines=lines)


def aligned(found: Sequence[tuple[str, ExampleRates]]) -> Floats:
    """Return the figures of several runs, (runs, examples), in the order of the first; NoExamplesError on others."""
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


def _text(record: Record, key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is no text")
    return value
