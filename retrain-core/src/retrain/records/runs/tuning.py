"""Reads from a campaign's manifest how its conditions were tuned; malformed parts count as absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.records.reading import Record, integers_in, number, table_of, tables_in, text

Values = Mapping[str, Any]  # by path


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionTuning:
    """The search for one condition: `tried` configurations with the metric, None if they failed.

    `blocks` has a label for each: of equal ones the values depend on each other, as in a search that learns.
    `budget` is in words; `chosen` are the values by final seed (None: for all).
    """

    metric: str
    budget: str
    seeds: tuple[int, ...]
    keys: Mapping[str, str]
    tried: tuple[tuple[Values, float | None], ...]
    blocks: tuple[str, ...]
    chosen: Mapping[int | None, Values]

    @property
    def is_per_seed(self) -> bool:
        return None not in self.chosen

    def values_of(self, seed: int | None) -> Values:
        return self.chosen.get(seed) or self.chosen.get(None) or {}


def read_tuning(manifest: Record) -> dict[str, ConditionTuning]:
    """Return the tuned conditions by label; empty if the campaign has none, or has not ended its search."""
    tuning = table_of(manifest, "tuning")
    learns = tuning.get("sampler") == "tpe" or tuning.get("pruner") == "halving"
    apart = ("for_seed",) if learns else ("for_seed", "number")
    unit = "runs" if number(tuning.get("runs")) else "tokens"
    return {
        label: ConditionTuning(
            metric=text(tuning.get("metric")),
            budget=f"with {int(number(tuning.get(unit)) or 0):,} {unit}",
            seeds=integers_in(tuning.get("seeds")),
            keys={path: text(each) for path, each in table_of(tuning, "keys").items()},
            tried=tuple((table_of(t, "values"), number(t.get("value"))) for t in tables_in(content.get("trials"))),
            blocks=tuple(str([t.get(name) for name in apart]) for t in tables_in(content.get("trials"))),
            chosen={each.get("for_seed"): table_of(each, "values") for each in tables_in(content.get("chosen"))},
        )
        for label, content in table_of(tuning, "conditions").items()
        if isinstance(content, dict)
    }
