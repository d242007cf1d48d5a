"""How every source reads `[data]`: its own options, and an error for keys that it does not read."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from retrain.api import ConfigError, PluginContext, Problem

Options = TypeVar("Options", bound=BaseModel)


def options_of(context: PluginContext, model: type[Options]) -> Options:
    """The validated `[data.options]`; the kernel has validated them already where it has the model."""
    given = context.params
    return given if isinstance(given, model) else model.model_validate(context.config.data.options)


def refuse_foreign_keys(context: PluginContext, source: str, names: tuple[str, ...]) -> None:
    """ConfigError when a `[data]` key is set that this source does not read, for none may be ignored silently."""
    data = context.config.data
    problems = [
        Problem(
            where=context.config.place(f"data.{name}"),
            what=f"is not read by source {source!r}",
            fix="remove it, or use the source that reads it",
        )
        for name in (*names, "messages_key")
        if getattr(data, name) != type(data).model_fields[name].default
    ]
    if problems:
        raise ConfigError(*problems)


def split_text(value: object) -> object:
    """The parts of `"a,b"`, which is how a command-line flag gives a list; anything else unchanged."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
