"""Functions of notebooks and scripts as modules: what goes with them, and what is refused by name."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retrain.facade.capture import capture, settings_of
from retrain.kernel.errors import ConfigError
from tests.kit.problems import codes_in

CELL = '''
import functools
import math
import re
import numpy as np
from collections.abc import Sequence
from functools import lru_cache
from retrain.api import Example

LIMIT, HUGE = 3, float("inf")
UNITS = {"km": 1000, "m": (1, 2), "x": {3}, "y": [None, True, b"z"]}
NUMBER = re.compile(r"\\d+", re.I)
API_KEY = "k"
own = object()


class Helper:
    def method(self, response, reference):
        return 1.0


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


@lru_cache
def squared(n):
    return n * n


def plain_wrapper(function):
    def inside(response, reference):
        return function(response, reference)

    return inside


def score(response: str, reference: str = str(LIMIT), *more: Sequence[int]) -> float:
    """A number from everything around it."""

    class Local:
        half = 0.5
        whole = half * 2

    found = [int(each) for each in NUMBER.findall(response)]
    lookup = {key: value for key, value in UNITS.items() if key}
    return float(np.sum(found) + squared(LIMIT) + math.sqrt(4) + Local.whole + even(4) + len(lookup) + (HUGE < 0))


def gold(example: Example):
    return example.reference


async def later(example, completion):
    return len(completion)


def with_class(a, b):
    return Helper


def with_object(a, b):
    return own


def counting(a, b):
    global LIMIT
    LIMIT += 1


def unknown(a, b):
    return no_such_name


def secret(a, b):
    api_key = "sk-1234567890abcdef"
    return api_key


def closing(weight):
    def weighted(response, reference):
        return weight

    return weighted


wrapped = plain_wrapper(score)
relabelled = functools.wraps(score)(lambda a, b: 0.0)
shortest = lambda a, b: 1.0
'''


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a notebook holds after this cell: names of `__main__`, with the source that IPython keeps."""
    name = "<ipython-input-1>"
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(keepends=True), name))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, name, "exec"), names)
    return names


def loaded(file: Path, name: str = "copied") -> ModuleType:
    """The module of a file, imported, but not among `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(source: str, folder: Path) -> ModuleType:
    (folder / "copied.py").write_text(source, encoding="utf-8")
    return loaded(folder / "copied.py")


def test_a_copy_computes_the_same_without_the_notebook(cell: dict[str, Any], tmp_path: Path) -> None:
    found = capture(cell["score"], "reward", companion="gold")
    assert found.path.startswith("score_")
    assert found.path.endswith(".score")
    assert capture(cell["score"], "reward", companion="gold") == found
    copied = imported(found.source, tmp_path)
    assert copied.score("12 a 3", "") == cell["score"]("12 a 3", "") == 32.0
    assert inspect.signature(copied.score) == inspect.signature(cell["score"])
    assert cell["UNITS"] == copied.UNITS
    assert cell["NUMBER"] == copied.NUMBER
    assert copied.gold is not None
    assert not hasattr(copied, "own")
    assert not hasattr(imported(capture(cell["score"], "advantage").source, tmp_path), "gold")
    assert imported(capture(cell["closing"](0.25), "reward").source, tmp_path).weighted("", "") == 0.25
    assert inspect.iscoroutinefunction(imported(capture(cell["later"], "reward").source, tmp_path).later)
    assert imported(capture(cell["even"], "reward").source, tmp_path).even(10)


def test_a_function_of_a_module_is_only_named() -> None:
    found = capture(inspect.unwrap, "advantage")
    assert (found.source, found.path) == ("", "inspect.unwrap")


def test_every_argument_sets_its_key(cell: dict[str, Any]) -> None:
    functions = dict.fromkeys(("reward", "advantage", "transform", "uncertainty"), cell["odd"])
    values, captured = settings_of({**functions, "reward": cell["later"]})
    assert [one.name for one in captured] == ["later", "odd", "odd", "odd"]
    assert values == {
        "reward.type": "custom",
        "reward.custom_module": captured[0].module,
        "reward.custom_function": "later",
        "algorithm.advantage_mode": captured[1].path,
        "algorithm.transform_mode": captured[2].path,
        "algorithm.uncertainty_kind": captured[3].path,
    }
    assert settings_of({"reward": None}) == ({}, [])


REFUSED: dict[str, list[Callable[[dict[str, Any]], Any]]] = {
    "plugin.lambda": [lambda names: names["shortest"], lambda names: eval("lambda a, b: 1.0", names)],
    "plugin.not-a-function": [
        *(lambda names: names["Helper"]().method, lambda names: names["Helper"], lambda names: len),
        lambda names: functools.partial(names["score"], ""),
    ],
    "plugin.uncopyable-object": [
        *(lambda names: names["with_class"], lambda names: names["with_object"], lambda names: names["wrapped"]),
        *(lambda names: names["closing"](object()), lambda names: names["closing"](names["Helper"]().method)),
    ],
    "plugin.assigns-global": [lambda names: names["counting"]],
    "plugin.undefined-name": [lambda names: names["unknown"]],
    "plugin.holds-secret": [lambda names: names["secret"]],
    "plugin.source-changed": [lambda names: names["relabelled"]],
}


@pytest.mark.parametrize(("made", "code"), [(made, code) for code, all_made in REFUSED.items() for made in all_made])
def test_what_cannot_be_copied_is_refused_by_name(
    made: Callable[[dict[str, Any]], Any], code: str, cell: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        capture(made(cell), "reward")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == (code, "retrain.train(reward=...)")
    assert problem.fix


def test_source_that_is_not_what_runs_is_refused(cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    edited = CELL.replace("return n * n", "return n * n * n").replace("n != 0 and", "n != 2 and")
    entry = (len(edited), None, edited.splitlines(keepends=True), "<ipython-input-1>")
    monkeypatch.setitem(linecache.cache, "<ipython-input-1>", entry)
    with pytest.raises(ConfigError) as caught:
        capture(cell["odd"], "reward")
    assert codes_in(caught) == ["plugin.source-changed"]
    monkeypatch.delitem(linecache.cache, "<ipython-input-1>")
    with pytest.raises(ConfigError) as caught:
        capture(cell["odd"], "reward")
    assert codes_in(caught) == ["plugin.source-unreadable"]


def test_a_module_that_only_this_process_has_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "only_here.py"
    file.write_text("FACTOR = 2\n\n\ndef twice(rewards):\n    return [FACTOR * each for each in rewards]\n")
    module = loaded(file, "only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    assert "FACTOR = 2" in capture(module.twice, "advantage").source
    monkeypatch.syspath_prepend(str(tmp_path))
    assert capture(module.twice, "advantage").path == "only_here.twice"
