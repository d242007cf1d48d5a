"""Builds the part that a name denotes, with its parameters as their model; what a backend promises, by its spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import Capabilities, EngineTraits, Kind
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins


def build_part(
    kind: Kind,
    name: str,
    path: str,
    context: PluginContext,
    options: Mapping[str, Any] | None = None,
    options_path: str = "",
    given: Sequence[Any] = (),
) -> Any:
    """What the factory of `name` returns; an unexpected exception becomes a PluginError with the plugin's name.

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
        raise PluginError(Problem(where=where, what=what, fix=f"repair {found.owner.distribution}")) from error


def validated_params(
    model: type[BaseModel] | None, given: Mapping[str, Any], *, where: str
) -> tuple[BaseModel | None, list[Problem]]:
    """The parameters as the plugin's model, or every problem with them; without a model, None for any parameters."""
    if model is None:
        return None, []
    try:
        return model.model_validate(dict(given)), []
    except ValidationError as error:
        return None, [_problem(detail, model, where) for detail in error.errors()]


def _problem(detail: Any, model: type[BaseModel], where: str) -> Problem:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] != "extra_forbidden":
        what = detail["msg"].removeprefix("Value error, ")
        return Problem(where=f"{where}.{name}", what=what, fix="correct the value")
    near = get_close_matches(name, model.model_fields, n=1)
    known = ", ".join(model.model_fields) or "none"
    return Problem(where=where, what=f"unknown option {name!r}", fix=f"use {near[0]!r}" if near else f"known: {known}")


def declared_capabilities(config: Config, plugins: Plugins) -> Capabilities | None:
    """What the configured backend promises with the configured engine, without importing either; None = unknown."""
    entries = plugins.find(Kind.BACKEND, config.backend.backend)
    capabilities = entries[0].spec.traits if entries else None
    if not isinstance(capabilities, Capabilities):
        return None
    engines = plugins.find(Kind.INFERENCE_ENGINE, config.inference.engine)
    traits = engines[0].spec.traits if engines else None
    return traits.limit(capabilities) if isinstance(traits, EngineTraits) else capabilities
