"""Finds plugins through entry points, lets each register, and keeps the errors of those that fail."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import pluggy

from retrain.kernel import hooks as hookspecs
from retrain.kernel.declared import Kind
from retrain.kernel.errors import HookError, Problem, RetrainError
from retrain.kernel.plugins.installed import KERNEL, normal_name, offered_plugins
from retrain.kernel.plugins.spec import LoadFailure, Owner, PluginSpec, Registered, Registry

HOOK_OF_KIND = {
    Kind.CONFIG_TABLE: "retrain_register_config_tables",
    Kind.COMMAND: "retrain_register_commands",
    Kind.TEMPLATE: "retrain_register_init_templates",
    Kind.DATA_SOURCE: "retrain_register_data_sources",
    Kind.ENVIRONMENT: "retrain_register_environments",
    Kind.REWARD: "retrain_register_rewards",
    Kind.BACKEND: "retrain_register_backends",
    Kind.INFERENCE_ENGINE: "retrain_register_inference_engines",
    Kind.ADVANTAGE: "retrain_register_advantages",
    Kind.TRANSFORM: "retrain_register_transforms",
    Kind.UNCERTAINTY: "retrain_register_uncertainties",
    Kind.ALGORITHM: "retrain_register_algorithms",
    Kind.PLANNING_DETECTOR: "retrain_register_planning_detectors",
    Kind.CONTROLLER: "retrain_register_controllers",
    Kind.RECORDER: "retrain_register_recorders",
    Kind.HEALTH_MONITOR: "retrain_register_health_monitors",
    Kind.PACER: "retrain_register_pacers",
    Kind.LAUNCHER: "retrain_register_launchers",
}


@dataclass(slots=True)
class Plugins:
    """Everything plugged in: the hooks, one registry per kind, and the entry points that failed."""

    pluggy: pluggy.PluginManager
    registries: dict[Kind, Registry] = field(default_factory=lambda: {kind: Registry(kind) for kind in Kind})
    failures: list[LoadFailure] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)  # distributions that RETRAIN_PLUGINS or RETRAIN_BLOCK exclude

    def notify(self, hook: str, **arguments: Any) -> Any:
        """Call a life-cycle hook; HookError names the plugin that raised."""
        caller = getattr(self.pluggy.hook, hook)
        try:
            return caller(**arguments)
        except RetrainError:
            raise
        except Exception as error:
            codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            culprits = [impl.plugin_name for impl in caller.get_hookimpls() if impl.function.__code__ in codes]
            what = f"{hook} of {' or '.join(culprits) or 'a plugin'} raised {type(error).__name__}: {error}"
            fix = "repair that plugin, or leave it out with RETRAIN_BLOCK=distribution"
            raise HookError(Problem(what=what, fix=fix)) from error

    def registered(self, kind: Kind) -> list[Registered]:
        """Every part of a kind, sorted by name."""
        return self.registries[kind].primary()

    def find(self, kind: Kind, name: str) -> list[Registered]:
        """The registrations of a name or alias: none, one, or several when they clash."""
        return self.registries[kind].entries.get(name, [])

    def add(self, plugin: object, owner: Owner) -> None:
        """Register one plugin object; an exception disables only that plugin and is kept in `failures`."""
        collected: list[tuple[Kind, PluginSpec]] = []
        try:
            self.pluggy.register(plugin, name=f"{owner.distribution}:{owner.source}")
            _refuse_faulty_hooks(plugin)
            for kind, hook in HOOK_OF_KIND.items():
                register = getattr(plugin, hook, None)
                if register is not None:
                    register(register=_collector(kind, collected))
        except Exception as error:  # a faulty plugin must not affect others; its error is shown with its owner
            self.failures.append(LoadFailure(owner=owner, error=f"{type(error).__name__}: {error}"))
            if self.pluggy.is_registered(plugin):
                self.pluggy.unregister(plugin=plugin)
            return
        for kind, spec in collected:
            self.registries[kind].add(spec, owner)


def load_plugins(environ: dict[str, str] | None = None) -> Plugins:
    """Discover and register every plugin.

    `RETRAIN_PLUGINS=a,b` loads only those distributions (retrain-core always), `RETRAIN_BLOCK=x,y` leaves some out.
    """
    settings = dict(os.environ) if environ is None else environ
    only, blocked = _names(settings.get("RETRAIN_PLUGINS")), _names(settings.get("RETRAIN_BLOCK"))
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
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


def _refuse_faulty_hooks(plugin: object) -> None:
    hooks = [n for n in dir(plugin) if n.startswith(f"{hookspecs.PROJECT}_") and callable(getattr(plugin, n))]
    if not hooks:
        name = getattr(plugin, "__name__", None) or type(plugin).__name__
        raise TypeError(f"{name} has no hook of retrain: its entry point must name a module with @hookimpl functions")
    for name in hooks:
        if not hasattr(hookspecs, name):
            raise TypeError(f"{name} is not a hook of retrain{_nearest_hook(name)}")
        if not hasattr(getattr(plugin, name), f"{hookspecs.PROJECT}_impl"):
            raise TypeError(f"{name} lacks the @hookimpl decorator of retrain.api")


def _nearest_hook(name: str) -> str:
    near = get_close_matches(name, dir(hookspecs), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _collector(kind: Kind, collected: list[tuple[Kind, PluginSpec]]) -> Any:
    def register(spec: PluginSpec) -> None:
        if not isinstance(spec, PluginSpec):
            raise TypeError(f"{HOOK_OF_KIND[kind]}: register() takes a PluginSpec, not {type(spec).__name__}")
        collected.append((kind, spec))

    return register
