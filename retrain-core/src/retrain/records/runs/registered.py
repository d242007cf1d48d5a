"""Reads the registered plan of a campaign from its manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import seal_of
from retrain.records.reading import integers_in, number, text, time_of
from retrain.records.runs.curves import Direction, Metric, parse_metric


class Spend(StrEnum):
    """The spending of alpha over the looks: evenly early on, or nearly all of it late."""

    POCOCK = "pocock"
    OBRIEN_FLEMING = "obrien_fleming"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A registered plan; parts that are missing or malformed in its manifest are None or empty."""

    hypothesis: str
    metric: Metric | None
    alpha: float | None
    stop_rule: str
    baseline: str
    direction: Direction | None
    conditions: tuple[str, ...]
    seeds: tuple[int, ...]
    max_steps: int | None
    written: datetime | None
    sha256: str
    is_intact: bool
    margin: float | None = None
    looks: tuple[int, ...] = ()
    spend: Spend = Spend.POCOCK
    is_unpaired: bool = False
    registered_in: str = ""

    def due(self, seeds: Sequence[int]) -> tuple[int, ...]:
        """Return the planned seeds expected if these are there: all, or with looks those up to the next look."""
        reached = max((self.seeds.index(seed) + 1 for seed in seeds if seed in self.seeds), default=0)
        return self.seeds[: next((look for look in self.looks if look >= reached), len(self.seeds))]


def read_plan(manifest: Mapping[str, Any]) -> Plan | None:
    """Return the plan in a campaign's manifest, None without one. A malformed one is not intact."""
    content = manifest.get("plan")
    if not isinstance(content, dict):
        return None
    alpha, max_steps = number(content.get("alpha")), number(content.get("max_steps"))
    sha256 = text(content.get("sha256"))
    margin, conditions = number(content.get("margin")), content.get("conditions")
    looks, seeds = integers_in(content.get("looks")), integers_in(content.get("seeds"))
    # Looks in any other form were not sealed by a campaign, and a test with made-up looks would promise nothing.
    is_plan_of_looks = list(looks) == sorted({*looks}) and looks[:1] > (0,) and looks[-1] == len(seeds)
    metric = None
    with suppress(ConfigError):
        metric = parse_metric(text(content.get("primary_metric")), where="plan")
    return Plan(
        hypothesis=text(content.get("hypothesis")),
        metric=metric,
        alpha=alpha if alpha is not None and 0.0 < alpha < 1.0 else None,
        stop_rule=text(content.get("stop_rule")),
        baseline=text(content.get("baseline")),
        direction=next((each for each in Direction if each.value == content.get("direction")), None),
        conditions=tuple(filter(text, conditions)) if isinstance(conditions, list) else (),
        seeds=seeds,
        max_steps=None if max_steps is None else int(max_steps),
        written=time_of(text(content.get("written"))),
        sha256=sha256,
        is_intact=sha256 == seal_of(content),
        margin=margin if margin is not None and 0.0 < margin < math.inf else None,
        looks=looks if is_plan_of_looks else (),
        spend=next((each for each in Spend if each.value == content.get("spend")), Spend.POCOCK),
        is_unpaired=text(content.get("test")) == "unpaired",
        registered_in=text(manifest.get("campaign_toml")),
    )
