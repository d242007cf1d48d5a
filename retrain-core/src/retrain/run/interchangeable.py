"""Devices and options of a backend that a resumed run may change, because they compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.kernel.registry import Plugins
from retrain.records.reading import table_of
from retrain.run.check import backend_options

PATHS = frozenset({"backend.devices", "backend.options"})


@runtime_checkable
class KnowsWhatIsKept(Protocol):
    """The options of a backend that computes the same on other devices; the model of its `[backend.options]`."""

    def kept_on_resume(self, devices: str) -> Mapping[str, Any]:
        """What a resumed run must keep of `[backend] devices` and these options, as plain data."""


def interchangeable(config: Config, manifest: Mapping[str, Any], plugins: Plugins) -> frozenset[str]:
    """The keys whose recorded values may differ from those of `config`, according to its backend."""
    before = table_of(manifest, "config", "backend")
    entries = plugins.find(Kind.BACKEND, config.backend.backend)
    model = entries[0].spec.load_params() if len(entries) == 1 else None
    if model is None or before.get("backend") != config.backend.backend:
        return frozenset()
    try:
        then, now = (model(**options) for options in (before.get("options", {}), backend_options(config, plugins)))
    except (ValidationError, TypeError):  # other options than this version knows: the comparison of keys names them
        return frozenset()
    if not isinstance(then, KnowsWhatIsKept) or not isinstance(now, KnowsWhatIsKept):
        return frozenset()
    is_same = then.kept_on_resume(before.get("devices", "")) == now.kept_on_resume(config.backend.devices)
    return PATHS if is_same else frozenset()
