"""What a plugin passes when it registers: a name, a one-line summary, and the location of its factory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import Function, Kind, TableTraits

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFunctions:
    """A backend's functions that are called while it is not built; `functions` of its `PluginSpec`.

    Each is a function or `"module:function"`, imported when it is called; None = the backend has none.

    `find_devices(config) -> (devices, why) | None`: the devices among `[backend] devices` that this machine has, and
    the reason if the user did not set the key; None = exactly as written. Called before anything loads. ConfigError
    when devices that the user set (see `config.origin`) are missing.

    `estimate_memory(config, model_folder) -> MemoryModel`: called by `capacity`, `explain` and at the start of a run.
    `model_folder()` is a folder with the model's `config.json`, fetched if necessary, and `model_folder(NAME)` one of
    another model. Read headers of weights if needed, import nothing heavy; ConfigError when the sizes cannot be read.

    `evaluate_loss(config, plugins, trial: LossTrial) -> LossValue`: value and gradient of `[algorithm] loss` in
    float64, for the tests of losses.

    `export_model(export: ModelExport) -> ExportedModel | None`: write a model with its adapter merged in, and compare
    its logits. `fetch_adapter(path, config) -> Path | None`: folder with a copy of an adapter stored elsewhere
    (`service://...`). Both are called for every backend until one returns something.

    `models` are the models that the distribution ships: folders by name, such as `builtin:tiny`.
    """

    find_devices: Function | None = None
    estimate_memory: Function | None = None
    evaluate_loss: Function | None = None
    export_model: Function | None = None
    fetch_adapter: Function | None = None
    models: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One registered part.

    `factory` is the object itself or `"module:attribute"`, imported only when the name is used;
    the hook that registers the kind says what it must be. `params` is the pydantic model of the part's parameters.
    `traits` is what others may read before the factory runs (a backend's `Capabilities`; of a command its
    group in `retrain --help`: train, look, compare, use, extend or tools), and `functions` what they may call.
    """

    name: str
    summary: str
    factory: Callable[..., Any] | object | str
    params: type[BaseModel] | str | None = None
    aliases: tuple[str, ...] = ()
    traits: object | None = None
    functions: BackendFunctions | None = None

    def load(self) -> Any:
        """The factory, imported now if it was given as text."""
        return load_target(self.factory)

    def load_params(self) -> type[BaseModel] | None:
        """The model of the parameters, imported now if it was given as text."""
        model = load_target(self.params)
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
        function: Callable[..., Mapping[str, Any]] = load_target(self.explain)
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


def load_target(target: object) -> Any:
    """The object itself, or the one that `"module:attribute"` names, imported now."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
