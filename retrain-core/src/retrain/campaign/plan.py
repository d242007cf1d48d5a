"""`[campaign.plan]`: the hypothesis and the analysis of a campaign, registered before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from retrain.kernel.config.keys import Table, key
from retrain.kernel.errors import ConfigError, Problem
from retrain.records.seal import SEAL, seal_of

SUMMARIES = ("final", "best", "auc")
PAIRED = "paired"
UNSET = {"looks": [], "n_max": 0, "spend": "pocock"}  # left out of what is sealed and compared: older plans lack them
STOP_RULE = "every run to max_steps; no run is stopped, added or left out because of its results"


class PlanTable(Table):
    """The hypothesis and the analysis that decides; `retrain compare` reports every departure from it."""

    hypothesis: str = Field(min_length=1, description="What the campaign is to show, in a sentence.")
    primary_metric: str = key(
        "eval_correct_rate:final", "Field of metrics.jsonl, and final, best or auc: the metric that decides."
    )
    alpha: float = key(0.05, "Chance of any false verdict over all comparisons together.", gt=0.0, lt=0.5)
    stop_rule: str = key(STOP_RULE, "When the campaign ends, in a sentence.", min_length=1)
    baseline: str = key("", "Label of the condition that the others are compared with; empty = the first.")
    direction: Literal["higher", "lower"] = key("higher", "Which side of the primary metric is better.")
    margin: float | None = key(
        None,
        "Differences below it, in units of the metric (0.02 = 2 pp of a rate), do not matter.",
        gt=0.0,
        allow_inf_nan=False,
    )
    test: Literal["paired", "unpaired"] = key(
        PAIRED, "Compares runs of one seed with each other, or all runs of two conditions whichever seeds they have."
    )
    looks: list[int] = key([], "Numbers of seeds after which the campaign looks and may stop; empty = at the end.")
    n_max: int = key(0, "With looks: the most seeds of a condition, which is the last look; 0 = that.", ge=0)
    spend: Literal["pocock", "obrien_fleming"] = key(
        "pocock", "With looks: how alpha is spent over them, evenly (pocock) or mostly late (obrien_fleming)."
    )

    @field_validator("hypothesis", "stop_rule")
    @classmethod
    def _says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("it holds only spaces: write a sentence")
        return text

    @field_validator("primary_metric")
    @classmethod
    def _metric(cls, text: str) -> str:
        field, _, summary = text.partition(":")
        if not field or (summary or SUMMARIES[0]) not in SUMMARIES:
            raise ValueError(f"{text!r} is not FIELD or FIELD:SUMMARY with a summary of {', '.join(SUMMARIES)}")
        return f"{field}:{summary or SUMMARIES[0]}"

    @field_validator("looks")
    @classmethod
    def _ascending(cls, looks: list[int]) -> list[int]:
        if any(later <= earlier for earlier, later in pairwise([0, *looks])):
            raise ValueError(f"{looks} are not numbers of seeds in ascending order, such as [8, 12, 16, 20]")
        return looks

    @model_validator(mode="after")
    def _of_the_looks(self) -> Self:
        if not self.looks:
            for name, default in UNSET.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name} has no effect without looks, such as looks = [8, 12, 16, 20]")
            return self
        if self.test != PAIRED:
            raise ValueError('looks go with test = "paired" only')
        if self.n_max not in (0, self.looks[-1]):
            raise ValueError(f"n_max is {self.n_max} and the last look {self.looks[-1]}: they must be equal")
        if self.stop_rule not in (STOP_RULE, self.written_stop_rule):
            raise ValueError("stop_rule is written by the plan when it has looks: remove it")
        return self

    @property
    def written_stop_rule(self) -> str:
        """What the campaign does when it has looks; else the stop rule as given."""
        if not self.looks:
            return self.stop_rule
        *first, last = map(str, self.looks)
        after = f"{', '.join(first)} and {last}" if first else last
        return (
            f"looks after {after} seeds; a condition gets no more once its verdict is in ({self.spend} spending of "
            f"alpha {self.alpha:g}) or its chance of one by {last} falls below 5 %; the campaign ends with the last"
        )

    def content(self) -> dict[str, Any]:
        """The plan as plain data, without keys of later versions that it does not use."""
        values: dict[str, Any] = self.model_dump(mode="json")
        if self.looks:
            values |= {"n_max": self.looks[-1], "stop_rule": self.written_stop_rule}
        left_out = {name for name, value in values.items() if value is None} | (set() if self.looks else set(UNSET))
        left_out |= {"test"} if self.test == PAIRED else set()
        return {name: value for name, value in values.items() if name not in left_out}


def seal_plan(
    plan: PlanTable, *, conditions: Sequence[str], seeds: Sequence[int], max_steps: int, written: str
) -> dict[str, Any]:
    """The plan as `manifest.json` stores it before the first step, with its `sha256`.

    `conditions` are the labels in order, `written` the time in UTC (ISO 8601). ConfigError if the baseline is not
    one of the conditions, or the last look is not at the last seed. The hash reveals a plan that was edited later,
    unless its hash was replaced as well.
    """
    baseline = plan.baseline or next(iter(conditions), "")
    if baseline not in conditions:
        what = f"{baseline!r} is not a condition of this campaign"
        raise ConfigError(Problem(where="[campaign.plan] baseline", what=what, fix=f"one of: {', '.join(conditions)}"))
    if plan.looks and plan.looks[-1] != len(seeds):
        what = f"the last look is after {plan.looks[-1]} seeds, and [campaign] seeds has {len(seeds)}"
        fix = f"end looks with {len(seeds)}, or list {plan.looks[-1]} seeds"
        raise ConfigError(Problem(where="[campaign.plan] looks", what=what, fix=fix))
    content = plan.content() | {
        "baseline": baseline,
        "conditions": list(conditions),
        "seeds": list(seeds),
        "max_steps": max_steps,
        "written": written,
    }
    return content | {SEAL: seal_of(content)}
