"""What a provider reads of `[environment]`: its `args` as a model of its own, and the limits of an episode."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from retrain.api import ConfigError, PluginContext, Problem, install_line

Arguments = TypeVar("Arguments", bound=BaseModel)
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


def arguments_of(context: PluginContext, model: type[Arguments]) -> Arguments:
    """The validated `[environment] args`; ConfigError lists every fault."""
    where = context.config.place("environment.args")
    try:
        return model.model_validate(dict(context.config.environment.args))
    except ValidationError as error:
        raise ConfigError(*(_problem(fault, model, where) for fault in error.errors())) from None


def require_library(context: PluginContext, module: str, extra: str) -> None:
    """ConfigError with the line that installs it when the library of a provider is missing; it is not imported."""
    if importlib.util.find_spec(module) is None:
        what = f"the package {module!r} is not installed"
        fix = install_line("retrain-rewards", extra)
        raise ConfigError(Problem(where=context.config.place("environment.provider"), what=what, fix=fix))


def _problem(fault: Any, model: type[BaseModel], where: str) -> Problem:
    name = ".".join(str(part) for part in fault["loc"])
    what = fault["msg"].removeprefix("Value error, ")
    fix = f"known: {', '.join(model.model_fields)}" if fault["type"] == "extra_forbidden" else "correct the value"
    return Problem(where=f"{where}.{name}" if name else where, what=what, fix=fix)
