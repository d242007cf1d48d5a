"""`retrain explain FILE` for a campaign."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retrain.kernel.config.resolved import Layer
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.campaign.devices import listed_devices
from retrain.rooms.campaign.load import Campaign, load_campaign
from retrain.rooms.session.check import declared_capabilities

FLAGS = ("--new", "--beyond-plan")  # of the command; not overrides of keys


def warnings_of(campaign: Campaign) -> list[str]:
    """Settings that are legal but may surprise."""
    table, found = campaign.table, []
    workers, cores = workers_of(campaign), os.cpu_count() or 1
    if table.launcher == "subprocess" and workers > cores:
        found.append(f"{workers} runs at a time on {cores} cores; [campaign] max_workers limits them")
    num_devices = len(listed_devices(campaign.config))
    if 1 < num_devices < workers * table.devices_per_run:
        found.append(f"{workers} runs at a time share {num_devices} devices")
    if campaign.config.origin("training.seed").layer is Layer.FILE:
        found.append("[training] seed is not used: seeds come from [campaign] seeds")
    return found


def workers_of(campaign: Campaign) -> int:
    """How many runs are active at a time."""
    table = campaign.table
    return min(table.max_workers or campaign.num_runs, campaign.num_runs) if table.parallel else 1


def explain(arguments: Sequence[str], plugins: Plugins) -> Mapping[str, Any]:
    """What the campaign would run, as plain data."""
    campaign = load_campaign([argument for argument in arguments if argument not in FLAGS], plugins)
    config, table = campaign.config, campaign.table
    capabilities = declared_capabilities(config, plugins)
    values = config.as_dict()
    origins = {
        path: {"value": values[path.partition(".")[0]].get(path.partition(".")[2]), "origin": str(origin)}
        for path, origin in sorted(config.origins.items())
        if path != "campaign.conditions"
    }
    return {
        "mode": "campaign",
        "config": config.source,
        "backend": config.backend.backend,
        "backend_capabilities": asdict(capabilities) if capabilities else {},
        "conditions": campaign.labels,
        "seeds": table.seeds,
        "max_steps": campaign.max_steps,
        "total_runs": campaign.num_runs,
        "total_steps": sum(campaign.steps_of(c) for c in campaign.conditions) * len(table.seeds),
        "parallel": table.parallel,
        "max_workers": table.max_workers,
        "launcher": table.launcher,
        "retries": table.retries,
        "warnings": warnings_of(campaign),
        "plan": table.plan.model_dump(mode="json") if table.plan else None,
        "origins": origins,
    }
