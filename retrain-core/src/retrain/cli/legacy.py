"""The keys of earlier versions that `retrain migrate-config` rewrites: `prime_rl_*` of [backend], now its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from retrain.kernel.config.legacy import moved

OPTIONS = ("transport", "zmq_host", "zmq_port", "zmq_hwm", "strict_advantages", "sync_wait_s", "sync_poll_s")
LEGACY_KEYS = {f"prime_rl_{option}": option for option in OPTIONS}
MOVED = {old: f"options.{new}" for old, new in LEGACY_KEYS.items()}


def legacy_names(backend: Iterable[Any]) -> tuple[str, ...]:
    """The legacy keys among the keys of [backend], in their order."""
    return tuple(str(name) for name in backend if name in LEGACY_KEYS)


def merged_options(backend: Mapping[str, Any]) -> dict[str, Any]:
    """[backend.options] with the legacy keys in it; a key that it has already wins."""
    given = backend.get("options", {})
    options: dict[str, Any] = moved(backend, MOVED).get("options", given)
    return dict(options if isinstance(options, Mapping) else {})
