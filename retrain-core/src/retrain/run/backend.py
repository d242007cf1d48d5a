"""The backend of a configuration: its devices on this machine, built, and given other weights to sample from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config, Layer, Origin
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.resolve import build_part, resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.records.reading import table_of
from retrain.records.record_names import RUN_FILE
from retrain.run.check import backend_options
from retrain.text.terminal_text import OUTCOME_LEVEL


def build_backend(context: PluginContext) -> Backend:
    """Build the configured backend, with its options; this loads the model."""
    config = context.config
    options = backend_options(config, context.plugins)
    backend: Backend = build_part(
        Kind.BACKEND, config.backend.backend, "backend.backend", context, options, "backend.options"
    )
    return backend


def import_backend(config: Config, plugins: Plugins) -> None:
    """Import the backend without building it; `build_backend` reports its faults."""
    where, paths = config.place("backend.backend"), config.plugins.search_paths
    with suppress(RetrainError):
        resolve(plugins, Kind.BACKEND, config.backend.backend, where=where, search_paths=paths)


LOG = logging.getLogger("retrain")
KEY = "backend.devices"
ENTRY = "devices"  # of `run.json`


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDevices:
    """A configuration with the devices that are used; `why` gives the reason, empty if the user chose them."""

    config: Config
    why: str

    @property
    def entry(self) -> dict[str, Any]:
        return {ENTRY: {"used": self.config.backend.devices, "why": self.why}}

    def log(self) -> None:
        if self.why:
            LOG.log(OUTCOME_LEVEL, "Devices: %s (%s)", self.config.backend.devices, self.why)


def choose_devices(config: Config, plugins: Plugins, before: Mapping[str, Any] | None = None) -> RunDevices:
    """Ask the backend for the devices of a run with `config`; ConfigError when devices that the user set are missing.

    `before` is the `run.json` of the run to continue. It keeps its devices unless the configuration sets others.
    """
    if before is None:
        used, why = _found(config, plugins)
        return RunDevices(config=_with(config, used), why=why)
    known = table_of(before, ENTRY)
    recorded = known.get("used", config.backend.devices)
    if config.origin(KEY) == DEFAULT_ORIGIN:
        config = _with(config, recorded, Origin(layer=Layer.FILE, place=RUN_FILE))
    chosen = _with(config, _found(config, plugins)[0])
    return RunDevices(config=chosen, why=str(known.get("why", "")) if chosen.backend.devices == recorded else "")


def _found(config: Config, plugins: Plugins) -> tuple[str, str]:
    name = config.backend.backend
    found: tuple[str, str] | None = plugins.call_backend("find_devices", config, backend=name)
    return found or (config.backend.devices, "")


def _with(config: Config, devices: str, origin: Origin | None = None) -> Config:
    backend = config.backend.model_copy(update={"devices": devices})
    origins = {**config.origins, KEY: origin} if origin else config.origins
    return replace(config, tables={**config.tables, "backend": backend}, origins=origins)
