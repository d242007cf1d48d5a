"""Assigns the devices of `[backend] devices` to the runs that are active at the same time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.records.campaign_table import CampaignTable

VARIABLE = "CUDA_VISIBLE_DEVICES"


def listed_devices(devices: str) -> list[str]:
    """The names in `[backend] devices`."""
    return [name.strip() for name in devices.split(",") if name.strip()]


def device_problems(config: Config, table: CampaignTable) -> list[Problem]:
    """Why the devices cannot be assigned to runs."""
    names = listed_devices(config.backend.devices)
    where = config.place("backend.devices")
    is_dealt_out = len(names) > max(1, table.devices_per_run)
    if is_dealt_out and not all(name.startswith("gpu:") and name[4:].isdigit() for name in names):
        what = f"{config.backend.devices!r}: several devices can be assigned to runs only if all of them are GPUs"
        return [Problem(where=where, what=what, fix='write "cpu", or for example "gpu:0,gpu:1"')]
    if 1 < len(names) < table.devices_per_run:
        what = f"{len(names)} devices are fewer than devices_per_run = {table.devices_per_run}"
        return [Problem(where=where, what=what, fix="list more, or lower [campaign] devices_per_run")]
    return []


def devices_of_a_run(devices: str, table: CampaignTable) -> str:
    """`[backend] devices` as a run sees them: the GPUs assigned to it are visible to it as gpu:0, gpu:1, ...

    A single device is shared by all runs.
    """
    names = listed_devices(devices)
    if len(names) < 2:
        return devices
    return ",".join("cpu" if name == "cpu" else f"gpu:{n}" for n, name in enumerate(names[: table.devices_per_run]))


def gpus_per_run(config: Config, table: CampaignTable) -> int:
    """How many of the listed GPUs each run takes; 0 on the CPU."""
    return sum(name.startswith("gpu:") for name in listed_devices(config.backend.devices)[: table.devices_per_run])


class DevicePool:
    """Counts the runs on each GPU; the next run gets those with the fewest, in the order in which they are listed."""

    def __init__(self, names: list[str], environ: Mapping[str, str] = os.environ) -> None:
        visible = listed_devices(environ.get(VARIABLE, ""))
        assigned = names if len(names) > 1 else []  # a single device is shared by all runs
        numbers = [int(name.removeprefix("gpu:")) for name in assigned if name.startswith("gpu:")]
        self._names = [visible[n] if n < len(visible) else str(n) for n in numbers]
        self._users: Counter[str] = Counter()

    def take(self, count: int) -> list[str]:
        """Names for `CUDA_VISIBLE_DEVICES`; empty if there is nothing to assign."""
        chosen = sorted(self._names, key=lambda name: self._users[name])[:count]
        self._users.update(chosen)
        return sorted(chosen, key=self._names.index)

    def give_back(self, names: list[str]) -> None:
        """Release the GPUs of a run that has ended."""
        self._users.subtract(names)
