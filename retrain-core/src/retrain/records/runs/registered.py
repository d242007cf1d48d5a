"""Reads the registered plan of a campaign from its manifest, and lists departures from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import seal_of
from retrain.records.reading import integers_in, number, text, time_of
from retrain.records.runs.metric import Direction, Metric, parse_metric


class Spend(StrEnum):
    """The spending of alpha over the looks: evenly early on, or nearly all of it late."""

    POCOCK = "pocock"
    OBRIEN_FLEMING = "obrien_fleming"


NO_PLAN = "no plan was registered before the runs ([campaign.plan])"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The aspects of a comparison that a plan fixes. `seeds` are those compared, by condition."""

    metric: Metric
    alpha: float
    baseline: str
    direction: Direction
    seeds: Mapping[str, Sequence[int]]
    is_all_pairs: bool
    aligned_on: str
    at_steps: int | None
    last: int | None
    first_start: datetime | None


def read_plan(manifest: Mapping[str, Any]) -> Plan | None:
    """Return the plan in a campaign's manifest, None without one. A malformed one is not intact."""
    content = manifest.get("plan")
    if not isinstance(content, dict):
        return None
    alpha, max_steps = number(content.get("alpha")), number(content.get("max_steps"))
    sha256 = text(content.get("sha256"))
    margin, conditions = number(content.get("margin")), content.get("conditions")
    return Plan(
        hypothesis=text(content.get("hypothesis")),
        metric=_metric(text(content.get("primary_metric"))),
        alpha=alpha if alpha is not None and 0.0 < alpha < 1.0 else None,
        stop_rule=text(content.get("stop_rule")),
        baseline=text(content.get("baseline")),
        direction=next((each for each in Direction if each.value == content.get("direction")), None),
        conditions=tuple(filter(text, conditions)) if isinstance(conditions, list) else (),
        seeds=integers_in(content.get("seeds")),
        max_steps=None if max_steps is None else int(max_steps),
        written=time_of(text(content.get("written"))),
        sha256=sha256,
        is_intact=sha256 == seal_of(content),
        margin=margin if margin is not None and 0.0 < margin < math.inf else None,
        looks=_looks(content),
        spend=next((each for each in Spend if each.value == content.get("spend")), Spend.POCOCK),
        is_unpaired=text(content.get("test")) == "unpaired",
        registered_in=text(manifest.get("campaign_toml")),
    )


def departures(plan: Plan | None, made: Analysis) -> tuple[str, ...]:
    """Return reasons why a comparison is exploratory, as sentences; empty if it is as planned."""
    if plan is None:
        return (NO_PLAN,)
    return (*_of_the_record(plan, made), *_of_the_analysis(plan, made), *_of_the_runs(plan, made))


def _of_the_record(plan: Plan, made: Analysis) -> list[str]:
    found = []
    if not plan.is_intact:
        found.append("the plan's hash does not match its text: it was changed after it was registered")
    if plan.written is None or made.first_start is None:
        found.append("nothing shows that the plan was written before the first step")
    elif plan.written.replace(microsecond=0) > made.first_start:  # `run.json` stores whole seconds
        times = (each.isoformat(" ", "seconds") for each in (plan.written, made.first_start))
        found.append("the plan was written {}, after the first run began ({})".format(*times))
    return found


def _of_the_analysis(plan: Plan, made: Analysis) -> list[str]:
    found = []
    for name, planned, actual in (
        ("metric", plan.metric, made.metric),
        ("alpha", plan.alpha, made.alpha),
        ("baseline", plan.baseline, made.baseline),
        ("better side", plan.direction, made.direction),
    ):
        if planned != actual:
            found.append(f"the {name} is {actual}, planned was {planned if planned else 'none'}")
    if made.is_all_pairs:
        found.append("all pairs are compared, planned was the baseline with each of the others")
    if made.aligned_on != "steps":
        found.append(f"aligned on {made.aligned_on}, planned was on steps")
    if made.last is not None:
        found.append(f"final is taken over the last {made.last} steps, planned was a tenth of them")
    if made.aligned_on == "steps" and made.at_steps != plan.max_steps:
        found.append(f"looked at after {made.at_steps} steps, planned was after {plan.max_steps}")
    return found


def _of_the_runs(plan: Plan, made: Analysis) -> list[str]:
    found = []
    for condition, seeds in made.seeds.items():
        if condition not in plan.conditions:
            found.append(f"{condition} was not planned")
            continue
        due = plan.due(seeds)
        missing, more = set(due) - set(seeds), set(seeds) - set(plan.seeds)
        if missing:
            planned = f"planned seeds of its {len(due)}-seed look" if len(due) < len(plan.seeds) else "planned seeds"
            found.append(f"{condition} lacks {len(missing)} of the {len(due)} {planned}")
        if more:
            found.append(f"{condition} has {len(more)} seeds that were not planned")
    found += [f"{condition} was planned and is missing" for condition in plan.conditions if condition not in made.seeds]
    return found


def _looks(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return ascending numbers of seeds, the last that of the planned seeds; none if they are anything else."""
    looks, seeds = integers_in(content.get("looks")), content.get("seeds")
    is_ascending = list(looks) == sorted({*looks}) and looks[:1] > (0,)
    return looks if is_ascending and isinstance(seeds, list) and looks[-1] == len(seeds) else ()


def _metric(text: str) -> Metric | None:
    try:
        return parse_metric(text, where="plan")
    except ConfigError:
        return None
