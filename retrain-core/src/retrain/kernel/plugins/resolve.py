"""Resolves a name in the TOML to the object it denotes, and builds the part with its parameters.

Order: registered name, `search_paths` prefix + dotted path, dotted path; two files for one dotted path are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import Capabilities, EngineTraits, Kind, PluginSpec
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError
from retrain.kernel.registry import Owner, Plugins, Registered

if TYPE_CHECKING:  # `retrain --help` resolves commands, and must start fast
    from pydantic import BaseModel

    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    name: str
    target: Any
    owner: Owner
    params: type[BaseModel] | None = None
    traits: object | None = None


def resolve(plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()) -> Found:
    """Import and return the object that `name` denotes; PluginError gives the reason. `where` names the key."""
    if problem := problem_with(plugins, kind, name, where=where, search_paths=search_paths):
        raise PluginError(problem)
    if entries := plugins.find(kind, name):
        return _loaded(entries[0], name, where)
    from retrain.kernel.plugins.dotted_path import load_dotted

    loaded = load_dotted(name, kind, where, search_paths)
    if loaded is None:
        raise PluginError(_missing(plugins, kind, name, where, search_paths))
    target, owner = loaded
    # Handled as if registered by a hook, so that its parameters and traits count.
    if isinstance(target, PluginSpec):
        return _loaded(Registered(kind=kind, spec=target, owner=owner), name, where)
    return Found(name=name, target=target, owner=owner)


def problem_with(
    plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()
) -> Problem | None:
    """The problem that `resolve` would raise, found without importing the part itself; None when it looks fine."""
    entries = plugins.find(kind, name)
    if len(entries) > 1:
        owners = " and ".join(f"{entry.owner} ({entry.owner.source})" for entry in entries)
        what = f"{kind} {name!r} is provided twice: by {owners}"
        fix = f"uninstall one, or leave one out with RETRAIN_BLOCK={entries[-1].owner.distribution}"
        return Problem(code="plugin.provided-twice", where=where, what=what, fix=fix)
    if entries:
        return None
    from retrain.kernel.plugins.dotted_path import ambiguity, module_of, module_part

    if module := module_part(name):
        two_files = ambiguity(f"{kind} {name!r}", module, where=where, search_paths=search_paths)
        if two_files or module_of(name, search_paths):
            return two_files
    return _missing(plugins, kind, name, where, search_paths)


def _missing(plugins: Plugins, kind: Kind, name: str, where: str, search_paths: Sequence[str]) -> Problem:
    # Only a faulty configuration needs them.
    from retrain.kernel.plugins.dotted_path import candidate_modules, module_part
    from retrain.kernel.plugins.missing import missing

    module = module_part(name)
    tried = candidate_modules(module, search_paths) if module else ()
    return missing(plugins, kind, name, where=where, tried=tried)


def _loaded(entry: Registered, name: str, where: str) -> Found:
    spec, owner = entry.spec, entry.owner
    try:
        target, params = spec.load(), spec.load_params()
    except Exception as error:
        what = f"{entry.kind} {name!r} of {owner} failed to load: {type(error).__name__}: {error}"
        why, fix = f"it was announced as {spec.factory!r}", f"repair or reinstall {owner.distribution}"
        raise PluginError(Problem(code="plugin.load-failed", where=where, what=what, why=why, fix=fix)) from error
    return Found(name=spec.name, target=target, owner=owner, params=params, traits=spec.traits)


def build_part(
    kind: Kind,
    name: str,
    path: str,
    context: PluginContext,
    options: Mapping[str, Any] | None = None,
    options_path: str = "",
    given: Sequence[Any] = (),
) -> Any:
    """Return the product of the factory of `name`; an unexpected exception becomes a PluginError naming the plugin.

    `path` and `options_path` are the keys (`table.key`) that name the part and its options, for messages; `given` are
    further arguments of factories of this kind.
    """
    config = context.config
    where = config.place(path)
    found = resolve(context.plugins, kind, name, where=where, search_paths=config.plugins.search_paths)
    params, problems = validated_params(found.params, options or {}, where=config.place(options_path))
    if problems:
        raise ConfigError(*problems)
    try:
        return found.target(replace(context, params=params), *given)
    except RetrainError:
        raise
    except Exception as error:
        what = f"{kind} {name!r} of {found.owner} could not be built: {type(error).__name__}: {error}"
        fix = f"repair the plugin in {found.owner.distribution}, or choose another {kind}"
        raise PluginError(Problem(code="plugin.build-failed", where=where, what=what, fix=fix)) from error


def validated_params(
    model: type[BaseModel] | None, given: Mapping[str, Any], *, where: str
) -> tuple[BaseModel | None, list[Problem]]:
    """The parameters as the plugin's model, or every problem with them; without a model, None for any parameters."""
    if model is None:
        return None, []
    from pydantic import ValidationError

    try:
        return model.model_validate(dict(given)), []
    except ValidationError as error:
        return None, [_problem(detail, model, where) for detail in error.errors()]


def _problem(detail: Any, model: type[BaseModel], where: str) -> Problem:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] != "extra_forbidden":
        what = f"invalid option: {detail['msg'].removeprefix('Value error, ')}"
        return Problem(code="plugin.bad-option", where=f"{where}.{name}", what=what, fix="correct the value")
    near, known = get_close_matches(name, model.model_fields, n=1), ", ".join(model.model_fields) or "none"
    what, fix = f"unknown option {name!r}", f"use {near[0]!r}" if near else f"known: {known}"
    return Problem(code="plugin.unknown-option", where=where, what=what, fix=fix)


def declared_capabilities(config: Config, plugins: Plugins) -> Capabilities | None:
    """Capabilities of the configured backend with the configured engine, importing neither; None = unknown."""
    capabilities = plugins.traits_of(Kind.BACKEND, config.backend.backend, Capabilities)
    traits = plugins.traits_of(Kind.INFERENCE_ENGINE, config.inference.engine, EngineTraits)
    return traits.limit(capabilities) if capabilities and traits else capabilities
