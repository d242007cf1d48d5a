"""`[health]`: which monitors watch a run, what they may do, and their thresholds."""

from __future__ import annotations

from typing import Literal

from retrain.kernel.config.keys import Table, key
from retrain.kernel.declared import Kind


class HealthTable(Table):
    """Warnings about runs that learn nothing."""

    monitors: list[str] = key(
        ["default", "gaming"], "Health monitors, by name; [] = none.", names=Kind.HEALTH_MONITOR, free_on_resume=True
    )
    policy: Literal["warn", "stop"] = key(
        "warn", "warn, or stop: save a checkpoint and end with exit code 1 at the first finding.", free_on_resume=True
    )
    steps: int = key(3, "Steps in a row that make a finding.", ge=1, free_on_resume=True)
    truncation: float = key(
        0.9,
        "Finding above this share of completions cut off at max_tokens; 1 = never.",
        ge=0.0,
        le=1.0,
        free_on_resume=True,
    )
    entropy_collapse: float = key(
        0.1,
        "Finding below this fraction of the entropy of the first steps; 0 = never.",
        ge=0.0,
        lt=1.0,
        free_on_resume=True,
    )
    entropy_explosion: float = key(
        5.0, "Finding above this multiple of the entropy of the first steps; 0 = never.", ge=0.0, free_on_resume=True
    )
    length_collapse: float = key(
        0.1,
        "Finding below this fraction of the mean length of the first steps; 0 = never.",
        ge=0.0,
        lt=1.0,
        free_on_resume=True,
    )
    ratio_drift: float = key(
        0.1, "Finding when |ratio_mean - 1| is above this; 0 = never.", ge=0.0, free_on_resume=True
    )
    ess_frac: float = key(0.5, "Finding when ess_frac is below this; 0 = never.", ge=0.0, lt=1.0, free_on_resume=True)
