"""`[teacher]`: the model that teaches, and where it runs."""

from __future__ import annotations

from retrain.kernel.config.plugin_tables import HERE
from retrain.kernel.config.resolved import Config


def has_teacher(config: Config) -> bool:
    """Whether a run has one."""
    table = config.teacher
    return bool(table.model or table.adapter or table.engine != HERE)
