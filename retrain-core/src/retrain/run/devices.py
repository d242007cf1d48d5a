"""The devices that a run uses on this machine, settled before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config, Layer, Origin
from retrain.kernel.registry import Plugins
from retrain.records.record_names import RUN_FILE
from retrain.text.terminal_text import OUTCOME_LEVEL

LOG = logging.getLogger("retrain")
KEY = "backend.devices"
ENTRY = "devices"  # of `run.json`


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledDevices:
    """A configuration with the devices that are used. `why`: what decided about them, empty if somebody set them.

    `compared` is the configuration to compare with the one that a resumed run recorded.
    """

    config: Config
    compared: Config
    why: str

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of `run.json`."""
        return {ENTRY: {"used": self.config.backend.devices, "why": self.why}}

    def log(self) -> None:
        """Log the devices that nobody chose."""
        if self.why:
            LOG.log(OUTCOME_LEVEL, "Devices: %s (%s)", self.config.backend.devices, self.why)


def settle_devices(config: Config, plugins: Plugins, before: Mapping[str, Any] | None = None) -> SettledDevices:
    """Ask the backend which devices a run with `config` uses; ConfigError when devices that somebody set are missing.

    `before` is the `run.json` of the run to continue, which keeps its devices unless the configuration sets others. A
    run that recorded none, because it is older than that, takes what is there, as it did.
    """
    if before is None:
        used, why = _found(config, plugins)
        settled = _with(config, used)
        return SettledDevices(config=settled, compared=settled, why=why)
    recorded = before.get("config", {}).get("backend", {}).get("devices", config.backend.devices)
    known = before.get(ENTRY)
    if not isinstance(known, dict):
        return _former(config, plugins, recorded)
    if config.origin(KEY) == DEFAULT_ORIGIN:
        config = _with(config, recorded, Origin(layer=Layer.FILE, place=RUN_FILE))
    settled = _with(config, _found(config, plugins)[0])
    why = str(known.get("why", "")) if settled.backend.devices == recorded else ""
    return SettledDevices(config=settled, compared=settled, why=why)


def _former(config: Config, plugins: Plugins, recorded: str) -> SettledDevices:
    """A run whose `run.json` says what was asked for, not what was used."""
    then, why = _found(_with(config, recorded, DEFAULT_ORIGIN), plugins)
    is_same = config.backend.devices == recorded
    if not is_same or config.origin(KEY).layer in (Layer.ENVIRONMENT, Layer.COMMAND_LINE):  # asked for now, not then
        config = _with(config, _found(config, plugins)[0])
    if config.backend.devices not in (recorded, then):
        return SettledDevices(config=config, compared=config, why="")
    if config.origin(KEY) != DEFAULT_ORIGIN:
        why = f"{recorded} is missing; the version that started this trained on the CPU then" * (then != recorded)
    return SettledDevices(config=_with(config, then), compared=_with(config, recorded), why=why if is_same else "")


def _found(config: Config, plugins: Plugins) -> tuple[str, str]:
    name = config.backend.backend
    found: tuple[str, str] | None = plugins.call_backend("find_devices", config, backend=name)
    return found or (config.backend.devices, "")


def _with(config: Config, devices: str, origin: Origin | None = None) -> Config:
    backend = config.backend.model_copy(update={"devices": devices})
    origins = dict(config.origins)
    if origin == DEFAULT_ORIGIN:
        origins.pop(KEY, None)
    elif origin is not None:
        origins[KEY] = origin
    return replace(config, tables={**config.tables, "backend": backend}, origins=origins)
