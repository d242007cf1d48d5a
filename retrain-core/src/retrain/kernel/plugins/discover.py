"""Finds plugins through entry points and lets each register."""

from __future__ import annotations

import os

import pluggy

from retrain.kernel import hooks
from retrain.kernel.plugins.installed import KERNEL, normal_name, offered_plugins
from retrain.kernel.registry import LoadFailure, Owner, Plugins


def load_plugins(environ: dict[str, str] | None = None) -> Plugins:
    """Discover and register every plugin.

    `RETRAIN_PLUGINS=a,b` loads only those distributions (retrain-core always), `RETRAIN_BLOCK=x,y` leaves some out.
    """
    settings = dict(os.environ) if environ is None else environ
    only, blocked = _names(settings.get("RETRAIN_PLUGINS")), _names(settings.get("RETRAIN_BLOCK"))
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    plugins = Plugins(pluggy=manager)
    present = set()
    for offer in offered_plugins():
        source = offer.entry.value
        owner = Owner(distribution=offer.distribution or "unknown", version=offer.version, source=source)
        name = normal_name(owner.distribution)
        present.add(name)
        if name != KERNEL and (name in blocked or (only and name not in only)):
            plugins.left_out.add(name)
            continue
        if offer.unmet:
            plugins.failures.append(LoadFailure(owner=owner, error=offer.unmet))
            continue
        try:
            plugin = offer.entry.load()
        except Exception as error:  # a broken plugin must not affect the others
            plugins.failures.append(LoadFailure(owner=owner, error=f"{type(error).__name__}: {error}"))
            continue
        plugins.add(plugin, owner)
    for name in sorted((only | blocked) - present):
        owner = Owner(distribution=name, source="RETRAIN_PLUGINS or RETRAIN_BLOCK")
        plugins.failures.append(LoadFailure(owner=owner, error="no such distribution offers plugins"))
    return plugins


def _names(text: str | None) -> frozenset[str]:
    return frozenset(normal_name(part.strip()) for part in (text or "").split(",") if part.strip())
