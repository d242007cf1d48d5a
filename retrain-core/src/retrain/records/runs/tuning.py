"""Reads from a campaign's manifest how its conditions were tuned; malformed parts count as absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.records.reading import Record, integers_in, number, table_of, tables_in, text

FAILED = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One configuration: `values` by path, and the metric, None if it failed."""

    values: Mapping[str, Any]
    value: float | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionTuning:
    """The search for one condition: `budget` in `unit`, and the values chosen by final seed (None: for all)."""

    metric: str
    unit: str
    budget: int
    runs: int
    tokens: int
    seeds: tuple[int, ...]
    is_per_seed: bool
    keys: Mapping[str, str]
    tried: tuple[Tried, ...]
    chosen: Mapping[int | None, Mapping[str, Any]]

    def values_of(self, seed: int | None) -> Mapping[str, Any]:
        return self.chosen.get(seed) or self.chosen.get(None) or {}


def read_tuning(manifest: Record) -> dict[str, ConditionTuning]:
    """Return the tuned conditions by label; empty if the campaign has none, or has not ended its search."""
    tuning = table_of(manifest, "tuning")
    found = {}
    for label, content in table_of(tuning, "conditions").items():
        if not isinstance(content, dict):
            continue
        chosen = tables_in(content.get("chosen"))
        found[label] = ConditionTuning(
            metric=text(tuning.get("metric")),
            unit=text(tuning.get("unit")),
            budget=int(number(tuning.get("budget")) or 0),
            runs=int(number(content.get("runs")) or 0),
            tokens=int(number(content.get("tokens")) or 0),
            seeds=integers_in(tuning.get("seeds")),
            is_per_seed=any(each.get("for_seed") is not None for each in chosen),
            keys={path: text(each) for path, each in table_of(tuning, "keys").items()},
            tried=tuple(
                Tried(values=table_of(each, "values"), value=number(each.get("value")), state=text(each.get("state")))
                for each in tables_in(content.get("trials"))
            ),
            chosen={each.get("for_seed"): table_of(each, "values") for each in chosen},
        )
    return found
