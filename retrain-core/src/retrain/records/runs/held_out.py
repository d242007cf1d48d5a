"""Finds runs that were evaluated on other held-out examples: their rates do not compare the conditions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.records.runs.example_rates import HELD_OUT_SET, NoExamplesError, per_example
from retrain.records.runs.metric import Metric, Summary
from retrain.records.runs.source import Candidate

SPLIT = ("eval.seed", "eval.examples")  # these draw the held-out examples from the data
# Examples come from here; other keys of [data] change the wording or order of prompts.
FROM = re.compile(r"data\.(?:source|path|options|prompt_key|answer_key|messages_key)|environment\..*")
MOST_NAMES = 3


def other_examples(compared: Sequence[Candidate], metric: Metric, *, are_ids_alike: bool) -> tuple[str, ...]:
    """Reasons why the runs do not share the held-out examples behind `metric`; empty for a metric of training.

    `are_ids_alike` says that `eval.jsonl` has the same ids in all of them: then paths of data are not compared.
    """
    if not metric.is_eval or not compared:
        return ()
    try:
        name = per_example(Metric(metric.field, Summary.FINAL)).name
    except NoExamplesError:  # another field of the evaluation, such as a mean length: the held-out examples'
        name = HELD_OUT_SET
    first = compared[0]
    reference = _drawn(first, name, with_data=not are_ids_alike)
    by_text: dict[str, list[Candidate]] = {}
    for run in compared[1:]:
        drawn = _drawn(run, name, with_data=not are_ids_alike)
        for key in sorted({*drawn, *reference}):
            if drawn.get(key) != reference.get(key):
                text = f"{key} is {drawn.get(key)!r}, in {first.name} {reference.get(key)!r}"
                by_text.setdefault(text, []).append(run)
    return tuple(f"other held-out examples: {_named(runs, compared)}: {text}" for text, runs in by_text.items())


def _drawn(run: Candidate, name: str, *, with_data: bool) -> dict[str, Any]:
    """The settings that decide which examples a set has."""
    config = run.record.get("config")
    tables: Mapping[str, Any] = config if isinstance(config, dict) else {}
    found = {
        f"{table}.{key}": value
        for table in ("eval", "data", "environment")
        if isinstance(keys := tables.get(table), dict)
        for key, value in keys.items()
    }
    if name != HELD_OUT_SET:
        sets = found.get("eval.sets")
        content = sets.get(name) if isinstance(sets, dict) else None
        return {f"eval.sets.{name}": content, "eval.seed": found.get("eval.seed")}
    return {key: each for key, each in found.items() if key in SPLIT or (with_data and FROM.fullmatch(key))}


def _named(runs: Sequence[Candidate], compared: Sequence[Candidate]) -> str:
    """The conditions of which all runs are meant, else the runs."""
    whole = [
        label
        for label in dict.fromkeys(run.condition for run in runs)
        if all(run in runs for run in compared if run.condition == label)
    ]
    names = [*whole, *(run.name for run in runs if run.condition not in whole)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
