"""Errors as users see them: where one was raised, and how several problems are told together."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.kernel.errors import ConfigError, Problem, raised_at

MakeModule = Callable[[str, str], types.ModuleType]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeModule:
    """`module("mine.py", source)`: a file below the current folder, imported."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, source: str) -> types.ModuleType:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return make


def place_of(function: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next  # this file
    return raised_at(caught.value)


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        ("mine.py", "def inner():\n    return {}['x']\n\ndef outer():\n    return inner()\n", 2),
        ("mine.py", "import json\n\ndef outer():\n    return json.loads('{')\n", 4),  # the library was called there
        ("lib/site-packages/theirs.py", "def outer():\n    raise ValueError\n", 2),
    ],
)
def test_the_innermost_line_of_the_users_files_is_named(file: str, source: str, line: int, module: MakeModule) -> None:
    assert place_of(module(file, source).outer) == f" ({file}:{line})"
    assert raised_at(ValueError()) == "", "nothing but the kernel"


def test_seventeen_problems_with_one_fix_are_told_once() -> None:
    failed = "failed to load: mine 1.0: ImportError"
    missing = [
        Problem(where=f"a.toml:{n} [t] k{n}", what=f"no 'p{n}'", why=f"known: {n}\n    {failed}", fix="install it")
        for n in range(16)
    ]
    problems = [*missing, Problem(where="a.toml:99 [x]", what="unknown table", fix="install it"), missing[3]]
    other = Problem(where="a.toml:5 [t] lr", what="must not be negative", fix="raise it")
    text = str(ConfigError(*problems[:5], other, *problems[5:]))
    assert text.startswith("1. 17 problems with one fix:\n    a.toml:0 [t] k0: no 'p0'\n        known: 0\n")
    assert text.endswith("\n2. a.toml:5 [t] lr: must not be negative\n    fix: raise it")
    assert (text.count("install it"), text.count(failed)) == (1, 1)
    assert all(text.count(f"{problem.where}: {problem.what}\n") == 1 for problem in problems)
    assert all(text.count(f"        known: {n}\n") == 1 for n in range(16))


def test_a_single_fix_needs_no_number_and_problems_without_a_fix_stay_apart() -> None:
    one = Problem(code="a.b-c", where="here", what="wrong", why="a rule", fix="change it")
    assert str(ConfigError(one, one)) == str(one) == "here: wrong [a.b-c]\n    a rule\n    fix: change it"
    two = Problem(where="there", what="wrong", why="a rule", fix="change it")
    expected = "2 problems with one fix:\n    here: wrong [a.b-c]\n    there: wrong\n    a rule\n    fix: change it"
    assert str(ConfigError(one, two)) == expected
    assert str(ConfigError("first", "second")) == "1. first\n2. second"
    assert ConfigError(one, two).codes == ["a.b-c", ""]
