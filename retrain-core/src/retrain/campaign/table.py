"""`[campaign]`: conditions x seeds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from retrain.campaign.plan import PlanTable
from retrain.kernel.config.keys import Table, key
from retrain.kernel.declared import Kind

SEEDS = [42, 101, 202, 303, 404, 505, 606, 707]
CONDITIONS = [
    {"advantage_mode": "grpo", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
]
SEED_END = 2**31


class CampaignTable(Table):
    """A sweep of conditions x seeds."""

    seeds: list[int] = key(SEEDS, "Root seed of each run of a condition.")
    max_steps: int = key(500, "Steps per run; overrides [training] max_steps.", ge=1)
    parallel: bool = key(False, "Several runs at a time.", free_on_resume=True)
    max_workers: int = key(
        0, "With parallel: runs at a time; 0 = all.", ge=0, free_on_resume=True, needs="campaign.parallel"
    )
    stagger_seconds: float = key(0.0, "Delay between launches.", ge=0.0, free_on_resume=True)
    conditions: list[dict[str, Any]] = key(
        CONDITIONS, "Conditions; each names advantage_mode and transform_mode, or a recipe, and may set any key."
    )
    controls: list[Literal["random_reward", "format_only", "no_update"]] = key(
        [], "Controls that each condition but the baseline must beat, too: a run each per seed."
    )
    retries: int = key(1, "Further attempts of a run that failed.", ge=0, free_on_resume=True)
    launcher: str = key(
        "subprocess",
        "What starts the runs: subprocess, ray, slurm or a plugin.",
        names=Kind.LAUNCHER,
        free_on_resume=True,
    )
    launcher_options: dict[str, Any] = key({}, "Options of the launcher.", free_on_resume=True)
    devices_per_run: int = key(1, "How many of [backend] devices each run gets when several are listed.", ge=1)
    plan: PlanTable | None = key(None, "What the campaign is to show, sealed before its first step.")

    @field_validator("seeds")
    @classmethod
    def _usable(cls, seeds: list[int]) -> list[int]:
        if not seeds:
            raise ValueError("at least one seed is needed")
        if bad := [seed for seed in seeds if not 0 <= seed < SEED_END]:
            raise ValueError(f"{bad[0]} is not a seed: 0 to {SEED_END - 1}")
        if twice := [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]:
            raise ValueError(f"seed {twice[0]} is listed more than once")
        return seeds

    @field_validator("controls")
    @classmethod
    def _once(cls, controls: list[str]) -> list[str]:
        if twice := [name for name in dict.fromkeys(controls) if controls.count(name) > 1]:
            raise ValueError(f"{twice[0]} is listed more than once")
        return controls

    @field_validator("conditions")
    @classmethod
    def _complete(cls, conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not conditions:
            raise ValueError("at least one condition is needed; omit the key for the five default ones")
        for number, condition in enumerate(conditions, start=1):
            for name in ("recipe",) if "recipe" in condition else ("advantage_mode", "transform_mode"):
                if not isinstance(condition.get(name), str) or not condition[name]:
                    raise ValueError(f"condition {number} needs {name}")
        return conditions
