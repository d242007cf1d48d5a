"""What `[scoring]` allows one reward."""

from __future__ import annotations

from retrain.api import Config


def time_limit_of(config: Config, name: str) -> float:
    """Seconds that scoring one completion may take: `[scoring.limits.NAME] timeout_s`, else `[scoring] timeout_s`."""
    limits = config.scoring.limits.get(name)
    own = limits.timeout_s if limits is not None else None
    return config.scoring.timeout_s if own is None else own
