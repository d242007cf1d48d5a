"""What every source does with `[data]`: its own options, and the keys that mean nothing to it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from retrain.api import ConfigError, PluginContext, Problem

Options = TypeVar("Options", bound=BaseModel)


def options_of(context: PluginContext, model: type[Options]) -> Options:
    """The validated `[data.options]`; a kernel that was given a model has checked them already."""
    given = context.params
    return given if isinstance(given, model) else model.model_validate(context.config.data.options)


def refuse_foreign_keys(context: PluginContext, source: str, names: tuple[str, ...]) -> None:
    """ConfigError when a `[data]` key that this source does not read is set: it must not be ignored silently."""
    data = context.config.data
    problems = [
        Problem(
            where=context.config.place(f"data.{name}"),
            what=f"is not read by source {source!r}",
            fix="remove it, or use the source it belongs to",
        )
        for name in names
        if getattr(data, name) != type(data).model_fields[name].default
    ]
    if problems:
        raise ConfigError(*problems)


def split_text(value: object) -> object:
    """`"a,b"`, as a command-line flag gives a list, as the list of its parts; anything else unchanged."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
