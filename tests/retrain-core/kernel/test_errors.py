"""Where an error was raised, as users see it."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.rooms.text.raised_at import raised_at

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


def test_the_innermost_line_of_the_users_files_is_named(module: MakeModule) -> None:
    mine = module("mine.py", "def inner():\n    return {}['x']\n\ndef outer():\n    return inner()\n")
    assert place_of(mine.outer) == " (mine.py:2)"


def test_an_error_of_a_library_is_named_where_it_was_called(module: MakeModule) -> None:
    mine = module("mine.py", "import json\n\ndef parse():\n    return json.loads('{')\n")
    assert place_of(mine.parse) == " (mine.py:4)"


def test_an_installed_plugin_is_named_too(module: MakeModule) -> None:
    theirs = module("lib/site-packages/theirs.py", "def boom():\n    raise ValueError\n")
    assert place_of(theirs.boom) == " (lib/site-packages/theirs.py:2)"


def test_without_a_line_outside_of_the_kernel_there_is_none() -> None:
    assert raised_at(ValueError()) == ""
