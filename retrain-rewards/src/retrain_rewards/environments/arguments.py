"""A provider's part of the configuration: its `args` as a model of its own, and the limits of an episode."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from pydantic import ValidationError

from retrain.api import ConfigError, PluginContext, Problem, Table, install_line
from retrain_rewards.environments.messages import Cleaner

Arguments = TypeVar("Arguments", bound=Table)
MAX_TURNS = 16  # of an episode, where [environment] max_turns leaves it open


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`[environment] max_turns`, and `timeout_s`, the time between two turns of all episodes together."""

    max_turns: int = MAX_TURNS
    timeout_s: float = 60.0

    @classmethod
    def of(cls, context: PluginContext, call_timeout_s: float) -> Self:
        """The limits of a run; ConfigError on 0 turns, and where one call may take as long as all of them together."""
        config, problems = context.config, []
        turns, timeout_s = config.environment.max_turns, config.environment.timeout_s
        if turns == 0:
            what, fix = "0 turns leave nothing to play", f"use 1 or more, or -1 for {MAX_TURNS}"
            problems.append(Problem(where=config.place("environment.max_turns"), what=what, fix=fix))
        if call_timeout_s >= timeout_s:
            what = f"timeout_s = {timeout_s:g} ends an episode before call_timeout_s = {call_timeout_s:g} ends a call"
            fix = "raise timeout_s, or lower call_timeout_s in args"
            problems.append(Problem(where=config.place("environment.timeout_s"), what=what, fix=fix))
        if problems:
            raise ConfigError(*problems)
        return cls(max_turns=turns if turns > 0 else MAX_TURNS, timeout_s=timeout_s)


@dataclass(frozen=True, kw_only=True)
class Settings(Generic[Arguments]):
    """A provider's own keys and the other values that it needs of the configuration, as plain data."""

    table: Arguments
    clean: Cleaner
    place: str  # of `args`, for messages
    limits: Limits = field(default_factory=Limits)
    system_prompt: str = ""
    instruction: str = ""

    @classmethod
    def of(cls, context: PluginContext, model: type[Arguments], *, most_chars: str) -> Self:
        """The settings of a run; ConfigError on every fault that shows without a server.

        `most_chars` names the key that limits the text of a result or observation.
        """
        config = context.config
        where, args = config.place("environment.args"), config.environment.args
        try:
            table: Any = model.model_validate(dict(args))
        except ValidationError as error:
            problems = []
            for fault in error.errors():
                fix = "correct the value"
                if fault["type"] == "extra_forbidden":
                    fix = f"known: {', '.join(model.model_fields)}"
                place = ".".join(map(str, (where, *fault["loc"])))
                problems.append(Problem(where=place, what=fault["msg"].removeprefix("Value error, "), fix=fix))
            raise ConfigError(*problems) from None
        return cls(
            table=table,
            clean=Cleaner.of(context.tokenizer, getattr(table, most_chars)),
            place=where,
            limits=Limits.of(context, table.call_timeout_s),
            system_prompt=config.data.system_prompt,
            instruction=config.data.instruction,
        )


def require_library(context: PluginContext, module: str, extra: str) -> None:
    """ConfigError with the line that installs it when the library of a provider is missing; it is not imported."""
    if importlib.util.find_spec(module) is None:
        what = f"the package {module!r} is not installed"
        fix = install_line("retrain-rewards", extra)
        raise ConfigError(Problem(where=context.config.place("environment.provider"), what=what, fix=fix))
