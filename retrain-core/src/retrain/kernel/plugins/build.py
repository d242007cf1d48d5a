"""Resolves the name of a part, validates its parameters against its declared model, and calls its factory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.types import Kind


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
