"""The `custom` reward: the user's function, found by its signature and called in a scoring process."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from retrain.api import ConfigError, Example, PluginContext, Problem, RewardError, Score
from retrain_rewards.faults import refused
from retrain_rewards.tables import RewardTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomReward:
    """Scores by the user's function, imported by each scoring process; async calls share its event loop."""

    location: Location
    style: Style
    has_gold: bool
    # Building it has imported the function.
    is_loaded: ClassVar[bool] = True

    def prepare(self) -> None:
        load_function(self.location)

    def score(self, example: Example, text: str) -> Score:
        arguments = (text, example.reference) if self.style is Style.TEXTS else (example, text)
        value = _called(load_function(self.location), *arguments)
        if value is None:
            return Score.no_verdict("the function returned None")
        if isinstance(value, Score):
            return value
        if isinstance(value, str | bytes | bytearray) or not hasattr(type(value), "__float__"):
            what = f"the function returned {type(value).__name__}, not a number, a Score or None"
            raise RewardError(Problem(code="reward.bad-result", what=what, fix="return a number, a Score or None"))
        return Score.of(value)

    def gold(self, example: Example) -> str | None:
        if not self.has_gold:
            return None
        gold = gold_of(load_module(self.location))
        text = None if gold is None else _called(gold, example)
        if text is not None and not isinstance(text, str):
            what = f"gold returned {type(text).__name__}, not text or None"
            raise RewardError(Problem(code="reward.bad-gold", what=what, fix="return text or None"))
        return text


def make_custom(context: PluginContext) -> CustomReward:
    table, config = context.config.table("reward", RewardTable), context.config
    if not table.custom_module.strip():
        what, fix = "reward 'custom' needs the module of its function", 'set custom_module, for example "my_reward"'
        raise refused(config.place("reward.custom_module"), code="reward.no-module", what=what, fix=fix)
    location = Location(module=table.custom_module, function=table.custom_function, folder=str(Path.cwd()))
    key = "custom_module"
    try:
        module = load_module(location)
        key = "custom_function"
        style = style_of(load_function(location), location.function)
        return CustomReward(location=location, style=style, has_gold=gold_of(module) is not None)
    except FunctionError as error:
        where = config.place(f"reward.{key}")
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        value = function(*arguments)
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> Any:
            return await value

        return _loop().run(awaited())
    except SystemExit as error:
        what = f"the function called sys.exit({error.code!r})"
        raise RewardError(Problem(code="reward.function-exited", what=what, fix="return a score instead")) from error


@lru_cache(maxsize=1)
def _loop() -> asyncio.Runner:
    return asyncio.Runner()


EXPECTED = "expected score(response, reference), or score(example, completion), both plain or async"
_REFERENCES = frozenset({"reference", "gold", "ground_truth", "target", "solution", "label"})
_RESPONSES = frozenset({"response", "completion", "text", "output", "prediction"})


class Style(StrEnum):
    """The arguments of the function, always by position."""

    TEXTS = "texts"  # (response, reference): two texts
    EXAMPLE = "example"  # (example, completion): the whole Example, and the completion's text


class FunctionError(RewardError):
    """The user's function cannot be used."""


def _unusable(*, code: str, what: str, why: str = "", fix: str) -> FunctionError:
    return FunctionError(Problem(code=code, what=what, why=why, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The place of a function: a dotted module name or a `.py` file, and the folder of the run."""

    module: str
    function: str
    folder: str

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")


def load_module(location: Location) -> ModuleType:
    folder = str(Path(location.folder, location.module).parent) if location.is_file else location.folder
    if folder not in sys.path:
        # The folder of a file comes first; otherwise the path of the run already has the order.
        sys.path.insert(0 if location.is_file else len(sys.path), folder)
    try:
        return _from_file(Path(location.folder, location.module)) if location.is_file else _by_name(location.module)
    except FunctionError:
        raise
    except (Exception, SystemExit) as error:  # the user's module may do anything while it is imported
        what = f"importing {location.module!r} failed with {type(error).__name__}: {error}"
        fix = f"make the module importable in {location.folder}"
        raise _unusable(code="reward.import-failed", what=what, fix=fix) from error


@lru_cache(maxsize=8)
def load_function(location: Location) -> Callable[..., Any]:
    module = load_module(location)
    function = getattr(module, location.function, None)
    if function is None:
        own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = get_close_matches(location.function, own, n=1)
        what = f"{module.__file__ or location.module} has no function {location.function!r}"
        fix = f"did you mean {near[0]!r}?" if near else f"name one that it has: {', '.join(own) or 'none'}"
        raise _unusable(code="reward.function-missing", what=what, fix=fix)
    if not callable(function):
        what = f"{location.function!r} of {location.module!r} is {type(function).__name__}, not a function"
        raise _unusable(code="reward.not-a-function", what=what, why=EXPECTED, fix="name a function")
    return function  # type: ignore[no-any-return]


def style_of(function: Callable[..., Any], name: str) -> Style:
    """Return the style of a function; FunctionError shows the expected signature and the one that was found."""
    try:
        signature: Any = "(...)"
        signature = inspect.signature(function)
        signature.bind(object(), object())
    except (ValueError, TypeError) as error:
        what = f"{name}{signature} cannot be called with two arguments: {error}"
        fix = f"take two arguments, or give the others defaults: def {name}(response, reference): ..."
        raise _unusable(code="reward.bad-signature", what=what, why=EXPECTED, fix=fix) from error
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in signature.parameters.values() if p.kind in by_position][:2]
    if len(parameters) < 2:
        what = f"{name}{signature} does not name its two arguments"
        fix = f"name them: def {name}(response, reference): ..."
        raise _unusable(code="reward.bad-signature", what=what, why=EXPECTED, fix=fix)
    is_example = []
    for parameter in parameters:
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        is_example.append(parameter.name == "example" or text.strip("\"'").rpartition(".")[2] == "Example")
    why, fix = f"{EXPECTED}; found {name}({', '.join(str(p) for p in parameters)})", "swap the two parameters"
    if is_example == [False, True]:
        raise _unusable(code="reward.arguments-swapped", what="the example comes first", why=why, fix=fix)
    if is_example[0]:
        return Style.EXAMPLE
    if parameters[0].name in _REFERENCES and parameters[1].name in _RESPONSES:
        raise _unusable(code="reward.arguments-swapped", what="the response comes first", why=why, fix=fix)
    return Style.TEXTS


def gold_of(module: ModuleType) -> Callable[..., Any] | None:
    gold = getattr(module, "gold", None)
    if not inspect.isfunction(gold):
        return None
    try:
        inspect.signature(gold).bind(object())
    except TypeError as error:
        what = f"gold{inspect.signature(gold)} cannot be called with one argument: {error}"
        why = "gold(example) returns a completion that must score 1; the audit before training scores it"
        fix = "take only the example, or rename the function"
        raise _unusable(code="reward.bad-gold", what=what, why=why, fix=fix) from error
    return gold


def _by_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        what, fix = f"{name!r} is neither a module name nor a .py file", "write package.module or PATH.py"
        raise _unusable(code="reward.bad-module-name", what=what, fix=fix)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        why = "it is looked for in this folder and among the installed packages"
        fix = "correct the name, or give the path of the .py file"
        raise _unusable(code="reward.module-missing", what=f"there is no module {name!r}", why=why, fix=fix) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        fix = "correct the path; it is relative to the folder of the run"
        raise _unusable(code="reward.module-missing", what=f"there is no file {path}", fix=fix)
    # From the whole path: two files `score.py` are two modules.
    name = "retrain_custom_reward_" + "_".join(path.resolve().with_suffix("").parts[1:])
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
    # Dataclasses and pickle look their module up.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
