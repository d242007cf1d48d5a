"""`[campaign.plan]`: the hypothesis and the analysis of a campaign, registered before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from retrain.kernel.config.keys import Table, key
from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.session.records.seal import SEAL, seal_of

SUMMARIES = ("final", "best", "auc")
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

    @field_validator("primary_metric")
    @classmethod
    def _metric(cls, text: str) -> str:
        field, _, summary = text.partition(":")
        if not field or (summary or SUMMARIES[0]) not in SUMMARIES:
            raise ValueError(f"{text!r} is not FIELD or FIELD:SUMMARY with a summary of {', '.join(SUMMARIES)}")
        return f"{field}:{summary or SUMMARIES[0]}"


def seal_plan(
    plan: PlanTable, *, conditions: Sequence[str], seeds: Sequence[int], max_steps: int, written: str
) -> dict[str, Any]:
    """The plan as `manifest.json` stores it before the first step, with its `sha256`.

    `conditions` are the labels in order, `written` the time in UTC (ISO 8601). ConfigError if the baseline is not
    one of the conditions. The hash reveals a plan that was edited later, unless its hash was replaced as well.
    """
    baseline = plan.baseline or next(iter(conditions), "")
    if baseline not in conditions:
        what = f"{baseline!r} is not a condition of this campaign"
        raise ConfigError(Problem(where="[campaign.plan] baseline", what=what, fix=f"one of: {', '.join(conditions)}"))
    content = plan.model_dump(mode="json", exclude_none=True) | {
        "baseline": baseline,
        "conditions": list(conditions),
        "seeds": list(seeds),
        "max_steps": max_steps,
        "written": written,
    }
    return content | {SEAL: seal_of(content)}
