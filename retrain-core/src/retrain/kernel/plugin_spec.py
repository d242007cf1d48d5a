"""What a plugin passes when it registers: a name, a one-line summary, and the location of its factory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import Kind, TableTraits

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One registered part.

    `factory` is the object itself or `"module:attribute"`, imported only when the name is used;
    `retrain.kernel.contracts` says per kind what it must be. `params` is the pydantic model of the part's parameters.
    `traits` is what others may read before the factory runs (a backend's `Capabilities`; of a command its
    group in `retrain --help`: train, look, compare, use, extend or tools).
    """

    name: str
    summary: str
    factory: Callable[..., Any] | object | str
    params: type[BaseModel] | str | None = None
    aliases: tuple[str, ...] = ()
    traits: object | None = None

    def load(self) -> Any:
        """The factory, imported now if it was given as text."""
        return _load(self.factory)

    def load_params(self) -> type[BaseModel] | None:
        """The model of the parameters, imported now if it was given as text."""
        model = _load(self.params)
        return model if model is None or isinstance(model, type) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The plugin that registered something: distribution, version, and the entry point or file it came from."""

    distribution: str
    version: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A spec together with its owner."""

    kind: Kind
    spec: PluginSpec
    owner: Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClaim:
    """The command that handles a TOML file that is not a training run.

    `command` is a registered command; it gets `FILE [overrides]` as `train` would. `explain` is `"module:function"`,
    `f(arguments, plugins) -> mapping`, which returns what `retrain explain FILE` shows.
    """

    command: str
    explain: str

    def load_explain(self) -> Callable[..., Mapping[str, Any]]:
        """The function, imported now."""
        function: Callable[..., Mapping[str, Any]] = _load(self.explain)
        return function


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A field of `metrics.jsonl`, explained.

    `name` may hold `{...}` where names vary (`eval_pass_at_{k}`). `unit` is empty for a plain number, `text`, `flag`,
    `list`, or a unit. `absent` says when a line lacks the field; empty = never.
    """

    name: str
    meaning: str
    unit: str = ""
    absent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """An entry point that could not be used, and its error."""

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
        """Register a spec under its name and aliases."""
        entry = Registered(kind=self.kind, spec=spec, owner=owner)
        if isinstance(spec.traits, TableTraits) and spec.traits.extends:
            self.extensions.append(entry)
            return
        for name in dict.fromkeys((spec.name, *spec.aliases)):
            self.entries.setdefault(name, []).append(entry)

    def primary(self) -> list[Registered]:
        """Every entry once, under its own name, sorted."""
        return [entry for name in sorted(self.entries) for entry in self.entries[name] if entry.spec.name == name]


def _load(target: object) -> Any:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
