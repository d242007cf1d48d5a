"""The `custom` reward itself: the user's function, called in a scoring process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from retrain.api import ConfigError, Example, PluginContext, Problem, RewardError, Score
from retrain_rewards.custom.function import (
    FunctionError,
    Location,
    Style,
    gold_of,
    load_function,
    load_module,
    style_of,
)
from retrain_rewards.tables import RewardTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomReward:
    """Scores by the user's function, which returns a number (True is 1.0), a Score, or None for no verdict.

    It pickles as the location of the function, which each scoring process imports. An async function runs there too,
    all calls in one event loop of that process. An exception is a failed score.
    """

    location: Location
    style: Style
    has_gold: bool
    is_loaded: ClassVar[bool] = True  # building it has imported the function

    def prepare(self) -> None:
        """Import the function."""
        _function(self.location)

    def score(self, example: Example, text: str) -> Score:
        """Score one completion; RewardError when the function returns something else, or calls `sys.exit`."""
        arguments = (text, example.reference) if self.style is Style.TEXTS else (example, text)
        return _as_score(_called(_function(self.location), *arguments))

    def gold(self, example: Example) -> str | None:
        """The value of the module's own `gold(example)`; None without such a function."""
        if not self.has_gold:
            return None
        gold = gold_of(load_module(self.location))
        text = None if gold is None else _called(gold, example)
        if text is not None and not isinstance(text, str):
            raise RewardError(f"gold returned {type(text).__name__}, not text or None")
        return text


def make_custom(context: PluginContext) -> CustomReward:
    """The `custom` reward; imports the module, ConfigError on a missing function or a signature that does not fit."""
    table, config = context.config.table("reward", RewardTable), context.config
    if not table.custom_module.strip():
        where, what = config.place("reward.custom_module"), "reward 'custom' needs the module of its function"
        raise ConfigError(Problem(where=where, what=what, fix='set [reward] custom_module, for example "my_reward"'))
    location = Location(module=table.custom_module, function=table.custom_function, folder=str(Path.cwd()))
    key = "custom_module"
    try:
        module = load_module(location)
        key = "custom_function"
        style = style_of(load_function(location), location.function)
        return CustomReward(location=location, style=style, has_gold=gold_of(module) is not None)
    except FunctionError as error:
        where = config.place(f"reward.{key}")
        raise ConfigError(Problem(where=where, what=str(error), why=error.why, fix=error.fix)) from error


def _as_score(value: Any) -> Score:
    if value is None:
        return Score.no_verdict("the function returned None")
    if isinstance(value, Score):
        return value
    if isinstance(value, str | bytes | bytearray) or not hasattr(type(value), "__float__"):
        raise RewardError(f"the function returned {type(value).__name__}, not a number, a Score or None")
    return Score.of(value)


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        value = function(*arguments)
        return _loop().run(_awaited(value)) if inspect.isawaitable(value) else value
    except SystemExit as error:
        raise RewardError(f"the function called sys.exit({error.code!r})") from error


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@lru_cache(maxsize=1)
def _loop() -> asyncio.Runner:
    """One event loop for all calls of the process, so that a client kept by the user's module stays usable."""
    return asyncio.Runner()


@lru_cache(maxsize=8)
def _function(location: Location) -> Callable[..., Any]:
    return load_function(location)
