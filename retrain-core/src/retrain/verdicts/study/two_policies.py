"""Compares two single runs, or two checkpoints, over the held-out examples that both answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import read_records
from retrain.records.runs.example_rates import ExampleRates, NoExamplesError, PerExample, aligned
from retrain.records.runs.metric import HELD_OUT, HELD_OUT_REWARD, Metric
from retrain.verdicts.stats.crossed import crossed

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPolicies:
    """Policy `second` minus `first`, paired by example: for other examples like these, and for these policies only.

    Student's t over the differences of examples, or of their clusters (Miller, arXiv:2411.00640). It is no verdict on
    the algorithms that trained them; that takes several seeds. `interval` and `p` are None without any spread.
    """

    first: str
    second: str
    metric: Metric
    difference: float
    interval: tuple[float, float] | None
    level: float
    p: float | None
    num_examples: int
    num_clusters: int


def two_policies(found: Sequence[tuple[str, ExampleRates]], metric: Metric) -> TwoPolicies:
    """Compare two policies by name; NoExamplesError if they did not answer the same examples."""
    first_E, second_E = aligned(found)
    (first, rates), (second, _) = found
    result = crossed((second_E - first_E)[None], level=LEVEL, clusters_E=rates.clusters)
    return TwoPolicies(
        first=first,
        second=second,
        metric=metric,
        difference=result.mean,
        interval=result.examples.interval if result.examples else None,
        level=LEVEL,
        p=result.examples.p if result.examples else None,
        num_examples=first_E.size,
        num_clusters=result.squares.num_clusters,
    )


def two_evaluations(files: Sequence[Path], metric: Metric | None) -> TwoPolicies:
    """Compare two files of `retrain eval`, of two checkpoints say; ConfigError if they cannot be compared."""
    metric = metric or HELD_OUT
    kinds = {HELD_OUT: "correct_rate", HELD_OUT_REWARD: "mean_reward"}
    if metric not in kinds:
        what, fix = f"files of `retrain eval` are not compared by {metric}", f"use {' or '.join(map(str, kinds))}"
        raise ConfigError(Problem(where="--metric", what=what, fix=fix))
    figure = PerExample(name="", kind=kinds[metric], k=0)
    try:
        return two_policies([(str(file), _rates(file, figure)) for file in files], metric)
    except NoExamplesError as error:
        fix = "evaluate both checkpoints on the same examples: `retrain eval RUN --checkpoint all`"
        raise ConfigError(Problem(where=str(files[1]), what=str(error), fix=fix)) from error


def _rates(file: Path, figure: PerExample) -> ExampleRates:
    fix = "give two files below `evaluations` of a run"
    ids, clusters, values = [], [], []
    for number, record in read_records(file):
        if number == 1 and "example" not in record:  # the first line describes the evaluation
            continue
        try:
            ids.append(str(record["example"]))
            clusters.append(str(record.get("cluster", record["example"])))
            values.append(figure.of(record))
        except (KeyError, TypeError, ValueError) as error:
            what = f"is not an example of an evaluation: {error}"
            raise ConfigError(Problem(where=f"{file}:{number}", what=what, fix=fix)) from error
    if not values:
        raise ConfigError(Problem(where=str(file), what="has no example", fix=fix))
    return ExampleRates(ids=tuple(ids), clusters=tuple(clusters), values_E=np.array(values), lines=len(values))
