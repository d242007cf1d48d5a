"""`[campaign.plan]`: the hypothesis and the analysis of a campaign, registered before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.campaign_table import PlanTable
from retrain.records.files import SEAL, seal_of


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
