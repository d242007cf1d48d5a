"""`[campaign]`: conditions x seeds."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from retrain.config.keys import Table, key

SEEDS = [42, 101, 202, 303, 404, 505, 606, 707]
CONDITIONS = [
    {"advantage_mode": "grpo", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
]


class CampaignTable(Table):
    """A sweep of conditions x seeds."""

    seeds: list[int] = key(SEEDS, "Root seed of each run of a condition.")
    max_steps: int = key(500, "Steps per run; overrides [training] max_steps.", ge=1)
    parallel: bool = key(False, "Run conditions at the same time, each in a process of its own.")
    max_workers: int = key(0, "Processes at a time; 0 = all runs.", ge=0)
    stagger_seconds: float = key(0.0, "Delay between launches.", ge=0.0)
    conditions: list[dict[str, Any]] = key(CONDITIONS, "Conditions; each names advantage_mode and transform_mode.")

    @field_validator("conditions")
    @classmethod
    def _complete(cls, conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, condition in enumerate(conditions, start=1):
            for name in ("advantage_mode", "transform_mode"):
                if not isinstance(condition.get(name), str) or not condition[name]:
                    raise ValueError(f"condition {number} needs {name}")
        return conditions
