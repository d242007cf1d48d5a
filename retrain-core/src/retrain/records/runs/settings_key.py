"""What a run learns by, without its seeds: equal for two runs of one condition, however the condition is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys in which runs of one condition may differ: none of them affects what a step learns.
FREE_TABLES = frozenset({"logging", "resume", "deadlines", "health", "campaign", "squeeze", "plugins"})
FREE_KEYS = frozenset(
    {
        *("training.seed", "training.max_steps", "training.save_every", "training.keep_last", "training.keep_best"),
        *("training.keep_best_metric", "training.grace_s", "backend.adapter_path", "backend.devices"),
        *("backend.throttle_dir", "backend.max_concurrent", "scoring.workers", "scoring.memory_gb", "scoring.cache"),
    }
)
SEED_KEYS = frozenset({"training.seed", "training.seeds", "eval.seed"})

SettingsKey = tuple[tuple[str, str], ...]


def settings_key(record: Mapping[str, Any]) -> SettingsKey:
    """The settings of a `run.json` that decide what a run learns, as sorted pairs of key and value."""
    config = record.get("config")
    return tuple(
        sorted(
            (f"{table}.{key}", str(value))
            for table, keys in (config if isinstance(config, dict) else {}).items()
            if table not in FREE_TABLES and isinstance(keys, dict)
            for key, value in keys.items()
            if f"{table}.{key}" not in FREE_KEYS | SEED_KEYS
        )
    )
