"""The devices that the runs of a campaign use on this machine, settled before anything runs or moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retrain.campaign.load import Campaign
from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.registry import Plugins
from retrain.run.devices import KEY, SettledDevices, settle_devices

OWN_MACHINE = "subprocess"  # the launcher whose runs are on this machine


def settle_campaign(
    campaign: Campaign, plugins: Plugins, before: Mapping[str, Any] | None, asked: Mapping[str, str]
) -> tuple[dict[str, SettledDevices], list[str]]:
    """The devices that the runs of each condition use on this machine, and those that differ from earlier ones.

    `before` is the manifest of an earlier session, whose runs keep their devices unless the file sets others; `asked`
    are the devices in its configuration by condition, if they differ from those of now. ConfigError when devices that
    somebody set are missing. Empty for a launcher that may start runs on other machines: each run settles its own.
    """
    if campaign.table.launcher != OWN_MACHINE:
        return {}, []
    recorded = (before or {}).get("devices")
    entries = recorded.items() if isinstance(recorded, dict) else ()
    known = {label: entry for label, entry in entries if isinstance(entry, dict) and "used" in entry}
    unset = [each.label for each in campaign.conditions if each.config.origin(KEY) == DEFAULT_ORIGIN]
    alike = next((known[label] for label in unset if label in known), None)  # what runs of new conditions use, too
    settled: dict[str, SettledDevices] = {}
    changes = []
    for condition in campaign.conditions:
        label, config = condition.label, condition.config
        entry = known.get(label) or (alike if label in unset else None)
        is_new = before is None or not any(run.get("condition") == label for run in before["runs"])
        if entry is None and is_new:
            settled[label] = settle_devices(config, plugins)
            continue
        then = entry["used"] if entry else asked.get(label, config.backend.devices)
        run = {"config": {"backend": {"devices": then}}} | ({"devices": entry} if entry else {})
        settled[label] = settle_devices(config, plugins, run)
        if entry and label not in unset:  # somebody has set them since
            settled[label] = replace(settled[label], why="")
        if (now := settled[label].compared.backend.devices) != then:
            changes.append(f"conditions {label} {KEY} was {then!r} and is now {now!r}")
    return settled, changes
