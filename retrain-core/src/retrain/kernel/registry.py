"""The registry of parts, the hooks of all plugins, and the errors of those that fail."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import pluggy

from retrain.kernel.declared import Function, Kind, PluginSpec, TableTraits, load_target
from retrain.kernel.errors import ConfigError, HookError, Problem, RetrainError

PLURALS = {Kind.UNCERTAINTY: "uncertainties", Kind.LOSS: "losses"}
BUILTIN = "builtin:"  # prefix of models that a distribution ships
HOOK_OF_KIND = {kind: f"retrain_register_{PLURALS.get(kind, f'{kind}s')}".replace(" ", "_") for kind in Kind}
Traits = TypeVar("Traits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The plugin that registered a part: distribution, version, and the entry point or file it came from."""

    distribution: str
    version: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    kind: Kind
    spec: PluginSpec
    owner: Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    owner: Owner
    error: str


@dataclass(slots=True)
class Registry:
    """All parts of one kind; a clash of two owners over one name is an error only when the name is used.

    A config table that extends another is not a second owner of it; it is kept in `extensions`.
    """

    kind: Kind
    entries: dict[str, list[Registered]] = field(default_factory=dict)
    extensions: list[Registered] = field(default_factory=list)

    def add(self, spec: PluginSpec, owner: Owner) -> None:
        entry = Registered(kind=self.kind, spec=spec, owner=owner)
        if isinstance(spec.traits, TableTraits) and spec.traits.extends:
            self.extensions.append(entry)
            return
        # `fromkeys` drops an alias that equals the name: it would clash with its own part.
        for name in dict.fromkeys((spec.name, *spec.aliases)):
            self.entries.setdefault(name, []).append(entry)


@dataclass(slots=True)
class Plugins:
    """The hooks, one registry per kind, and the entry points that failed."""

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
            # pluggy passes the exception on unchanged; only its frames show whose implementation raised.
            codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            culprits = [impl.plugin_name for impl in caller.get_hookimpls() if impl.function.__code__ in codes]
            raise _failed(f"{hook} of {' or '.join(culprits) or 'a plugin'}", error) from error

    def call_backend(self, function: str, *arguments: Any, backend: str = "") -> Any:
        """Call one of `BackendFunctions`: of `backend`, or of every backend until one returns something."""
        entries = self.find(Kind.BACKEND, backend) if backend else self.registered(Kind.BACKEND)
        for entry in entries:
            offered = getattr(entry.spec.functions, function) if entry.spec.functions else None
            if offered is not None and (answer := call(offered, *arguments)) is not None:
                return answer
        return None

    def locate_model(self, model: str) -> str | None:
        """Folder of a model that a backend's distribution ships, or None: `model` is then a folder or a hub id."""
        functions = [entry.spec.functions for entry in self.registered(Kind.BACKEND)]
        shipped = {name: folder for each in functions if each for name, folder in each.models.items()}
        if model in shipped:
            return str(shipped[model])
        if shipped and model.startswith(BUILTIN):
            what, fix = f"there is no built-in model {model!r}", f"use one of: {', '.join(sorted(shipped))}"
            raise ConfigError(Problem(code="model.unknown-builtin", where="[model] model", what=what, fix=fix))
        return None

    def registered(self, kind: Kind) -> list[Registered]:
        """Return every entry once, under its own name, sorted."""
        entries = self.registries[kind].entries
        return [entry for name in sorted(entries) for entry in entries[name] if entry.spec.name == name]

    def find(self, kind: Kind, name: str) -> list[Registered]:
        """Return the registrations of a name or alias: none, one, or several when they clash."""
        return self.registries[kind].entries.get(name, [])

    def traits_of(self, kind: Kind, name: str, form: type[Traits]) -> Traits | None:
        """Return what the part of this name declares about itself; None without a part or such a declaration."""
        entries = self.find(kind, name)
        traits = entries[0].spec.traits if entries else None
        return traits if isinstance(traits, form) else None

    def add(self, plugin: object, owner: Owner) -> None:
        """Register one plugin object; an exception disables only that plugin and is kept in `failures`."""
        # Kept back until every hook has run, so that a plugin that fails halfway registers nothing.
        collected: list[tuple[Kind, PluginSpec]] = []
        try:
            self.pluggy.register(plugin, name=f"{owner.distribution}:{owner.source}")
            refuse_faulty_hooks(plugin, self.pluggy)
            for kind, hook in HOOK_OF_KIND.items():
                register = getattr(plugin, hook, None)
                if register is not None:
                    register(register=partial(_collect, collected, kind))
        # A faulty plugin must not affect others; its error is shown with its owner.
        except Exception as error:
            self.failures.append(LoadFailure(owner=owner, error=f"{type(error).__name__}: {error}"))
            if self.pluggy.is_registered(plugin):
                self.pluggy.unregister(plugin=plugin)
            return
        for kind, spec in collected:
            self.registries[kind].add(spec, owner)


def call(function: Function, *arguments: Any) -> Any:
    """Call a function that a part announced, imported now; HookError names it when it fails."""
    try:
        return load_target(function)(*arguments)
    except RetrainError:
        raise
    except Exception as error:
        raise _failed(function if isinstance(function, str) else function.__qualname__, error) from error


def _failed(name: str, error: Exception) -> HookError:
    what = f"{name} raised {type(error).__name__}: {error}"
    fix = "repair that plugin, or leave it out with RETRAIN_BLOCK=distribution"
    return HookError(Problem(code="plugin.raised", what=what, fix=fix))


def has_hooks(plugin: object) -> bool:
    return any(name.startswith("retrain_") for name in dir(plugin))


def refuse_faulty_hooks(plugin: object, manager: pluggy.PluginManager) -> None:
    """TypeError for an object without hooks, with a misspelt one, or with one that lacks its decorator."""
    project = manager.project_name
    hooks = [n for n in dir(plugin) if n.startswith(f"{project}_") and callable(getattr(plugin, n))]
    if not hooks:
        name = getattr(plugin, "__name__", None) or type(plugin).__name__
        raise TypeError(f"{name} has no hook of retrain: its entry point must name a module with @hookimpl functions")
    for name in hooks:
        if getattr(manager.hook, name, None) is None or not getattr(manager.hook, name).has_spec():
            near = get_close_matches(name, [n for n, hook in vars(manager.hook).items() if hook.has_spec()], n=1)
            raise TypeError(f"{name} is not a hook of retrain{f'; did you mean {near[0]}?' if near else ''}")
        if not hasattr(getattr(plugin, name), f"{project}_impl"):
            raise TypeError(f"{name} lacks the @hookimpl decorator of retrain.api")


def _collect(collected: list[tuple[Kind, PluginSpec]], kind: Kind, spec: PluginSpec) -> None:
    if not isinstance(spec, PluginSpec):
        raise TypeError(f"{HOOK_OF_KIND[kind]}: register() takes a PluginSpec, not {type(spec).__name__}")
    collected.append((kind, spec))
