"""`retrain explain FILE` for a campaign."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.campaign.load import Campaign, listed_devices, load_campaign
from retrain.credit.configured_loss import capability_fields
from retrain.credit.flow import build_flow
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.run.check import with_plugin_rows
from retrain.run.notices import unclipped

FLAGS = ("--new", "--beyond-plan")  # of the command; not overrides of keys


def warnings_of(campaign: Campaign) -> list[str]:
    """Settings that are legal but may surprise."""
    table, found = campaign.table, []
    workers, cores = campaign.workers, os.cpu_count() or 1
    if table.launcher == "subprocess" and workers > cores:
        found.append(f"{workers} runs at a time on {cores} cores; [campaign] max_workers limits them")
    num_devices = len(listed_devices(campaign.config.backend.devices))
    if 1 < num_devices < workers * table.devices_per_run:
        found.append(f"{workers} runs at a time share {num_devices} devices")
    if campaign.config.origin("training.seed").layer is Layer.FILE:
        found.append("[training] seed is not used: seeds come from [campaign] seeds")
    found += verdict_warnings(campaign)
    return found + [
        f"{each.label}: the campaign sets {', '.join(sorted(each.beaten))}, which its recipe has otherwise"
        for each in campaign.conditions
        if each.beaten
    ]


def verdict_warnings(campaign: Campaign) -> list[str]:
    """A plan, or a number of seeds, with which no result could be a verdict; empty for a single condition."""
    from retrain.records.runs.registered import Spend
    from retrain.verdicts.study.comparison import Design
    from retrain.verdicts.study.looks import reach_of, reach_sentences

    table, plan = campaign.table, campaign.table.plan
    comparisons = sum(each.condition.control is None for each in campaign.conditions) - 1
    if comparisons < 1:
        return []
    if plan is None:
        return reach_sentences(reach_of(Design.FIXED, num_seeds=len(table.seeds), comparisons=comparisons, alpha=0.05))
    design = Design.UNPAIRED if plan.test == "unpaired" else Design.PLANNED if plan.looks else Design.FIXED
    reach = reach_of(
        design,
        num_seeds=len(table.seeds),
        comparisons=comparisons,
        alpha=plan.alpha,
        looks=plan.looks,
        spend=Spend(plan.spend),
    )
    return reach_sentences(reach)


def controls_of(campaign: Campaign) -> dict[str, int]:
    """The number of runs that each control costs."""
    found = Counter(each.condition.control for each in campaign.conditions if each.condition.control)
    return {str(control): count * len(campaign.table.seeds) for control, count in found.items()}


def value_rows(config: Config, *, of: Layer | None = None) -> dict[str, dict[str, Any]]:
    """Every value that is not a default, or those of one layer, with its origin, by path."""
    values, rows = config.as_dict(), {}
    for path, origin in sorted(config.origins.items()):
        table, _, name = path.partition(".")
        if of in (None, origin.layer):
            rows[path] = {"value": values[table].get(name), "origin": str(origin)}
    return rows


def explain(arguments: Sequence[str], plugins: Plugins) -> Mapping[str, Any]:
    campaign = load_campaign([argument for argument in arguments if argument not in FLAGS], plugins)
    config, table = campaign.config, campaign.table
    capabilities = declared_capabilities(config, plugins)
    origins = {path: row for path, row in value_rows(config).items() if path != "campaign.conditions"}
    recipes = {c.label: value_rows(c.config, of=Layer.RECIPE) for c in campaign.conditions}
    clipping = {c.label: unclipped(c.config, plugins, build_flow(c.config, plugins)) for c in campaign.conditions}
    clipping = {label: line for label, line in clipping.items() if line}
    content = {
        "mode": "campaign",
        "config": config.source,
        "backend": config.backend.backend,
        "backend_capabilities": capability_fields(capabilities, config.backend.backend, plugins),
        "conditions": campaign.labels,
        **({"clipping": clipping} if clipping else {}),
        "controls": controls_of(campaign),
        "recipes": {label: rows for label, rows in recipes.items() if rows},
        "seeds": table.seeds,
        "max_steps": campaign.max_steps,
        "total_runs": campaign.num_runs,
        "total_steps": sum(campaign.steps_of(c) for c in campaign.conditions) * len(table.seeds),
        "parallel": table.parallel,
        "max_workers": table.max_workers,
        "launcher": table.launcher,
        "retries": table.retries,
        "warnings": warnings_of(campaign),
        "plan": table.plan.content() if table.plan else None,
        "origins": origins,
    }
    return with_plugin_rows(content, config, plugins)
