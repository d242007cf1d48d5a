"""The modules that code imports and the variables that it reads, found in its text; values are never written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.identity.code import ALL, SECRET, UNSET, ImportGraph, variables_read
from tests.kit.shared import first_or_long

SOURCES = {
    "lab/__init__.py": "from lab.base import thing\n",
    "lab/base.py": "thing = 1\n",
    "lab/reward.py": '''"""Text that names lab.untouched and says: import nothing_of_ours"""
import os, lab.one as first, numpy
from lab import two, thing  # from lab import commented
from . import three
from .deep import (
    four,  # a comment with a )
    five as renamed,
)
from .deep.six import \\
    value
if True: import lab.seven
def score():
    from lab.eight import late
    import importlib
    importlib.import_module("lab.nine")
    __import__('lab.ten')
SPEC = PluginSpec(name="x", summary="", factory="lab.eleven:make")
from lab.missing import nothing
from .... import too_far
''',
    "lab/deep/__init__.py": "",
    "lab/deep/six.py": "from ..twelve import value\nfrom .. import reward\n",
    "loose/module.py": "from lab import thirteen\n",
    "lab/untouched.py": "",
}
NUMBERS = ("one", "two", "three", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = SOURCES | {f"lab/{name}.py": "value = late = 1\n" for name in NUMBERS}
    sources |= {f"lab/deep/{name}.py": "" for name in ("four", "five")}
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def found(graph: ImportGraph, root: Path) -> set[str]:
    return {os.path.relpath(module.file, root) for module in graph.found.values() if module.file}


def test_every_way_to_import_a_module_of_the_project_is_followed(lab: Path) -> None:
    graph = ImportGraph()
    assert graph.add("lab.reward")
    inside = {"__init__", "base", "reward", *NUMBERS[:-1], "deep/__init__", "deep/four", "deep/five", "deep/six"}
    assert found(graph, lab) == {f"lab/{name}.py" for name in inside}
    assert graph.add("loose.module")  # a folder without __init__.py
    assert {"loose/module.py", "lab/thirteen.py"} <= found(graph, lab)
    assert [graph.found[name].inside for name in ("lab", "lab.deep.six", "loose.module")] == [
        *("lab/__init__.py", "lab/deep/six.py", "loose/module.py")
    ]


def test_what_is_installed_or_recorded_elsewhere_is_not_the_project(lab: Path) -> None:
    graph = ImportGraph(foreign=frozenset({"lab"}))
    for name in ("json", "numpy.linalg", "sys", "nowhere", "lab.reward", "", "lab..one", "__main__"):
        assert not graph.add(name)
    assert graph.found == {}


def test_a_file_finds_its_neighbours_before_the_import_path(lab: Path) -> None:
    folder = lab / "rewards"
    folder.mkdir()
    (folder / "score.py").write_text("import base\nfrom lab import one\n")
    (folder / "base.py").write_text("")
    graph = ImportGraph()
    graph.add_file(folder / "score.py")
    assert {"rewards/score.py", "rewards/base.py", "lab/one.py"} <= found(graph, lab)


def test_sources_that_cannot_be_read_as_text_end_the_search_and_nothing_else(lab: Path) -> None:
    (lab / "lab/one.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9\xff'\nfrom lab import thirteen\n")
    (lab / "lab/two.py").write_bytes(b"\0\x80" * 100)
    (lab / "lab/three.py").unlink()
    os.mkfifo(lab / "lab/three.py")  # opening it would wait for a writer
    (lab / "lab/seven.py").unlink()
    (lab / "lab/seven.py").symlink_to("seven.py")
    graph = ImportGraph()
    assert graph.add("lab.reward")
    assert {"lab/thirteen.py", "lab/two.py"} <= found(graph, lab)
    assert not {"lab/three.py", "lab/seven.py"} & found(graph, lab)
    graph.add_file(lab / "lab/three.py")


ENVIRON = {"BONUS": "0.25", "OTHER": "1", "SHLVL": "2", "SSH_TTY": "/dev/pts/0", "JUDGE_API_KEY": "planted-secret-123"}
BONUS = variables_read([b"import os\nos.environ['BONUS']"], ENVIRON)["BONUS"]


BY_NAME = (
    'import os\ndef score(): return float(os.environ["BONUS"])',
    'import os\nX = os.environ.get("BONUS", "0")',
    'from os import environ\nX = environ.setdefault("BONUS", "0")',
    'from os import getenv\nX = getenv("BONUS")',
    'import os as system\nX = system.getenv("BONUS", "0")',
    'import os\nNAME = "BONUS"\ndef score(): return os.environ[NAME]',
    'import os\nX = "BONUS" in os.environ',
    "import os\nX = os.environb[b'BONUS']",
)
ANY = (
    "import os\nX = [os.environ[name] for name in ('BO' + 'NUS',)]",
    "import os\nX = dict(os.environ)",
    "import os\nX = getattr(os, 'environ')",
    "from os import getenv as read\nX = read('BONUS')",
    "import os\nX = os.path.expandvars('$BONUS')",
    "X = open('/proc/self/environ').read()",
    "import os\nX = os.environ[",
)


@pytest.mark.parametrize("source", [*BY_NAME, *ANY])
def test_a_literal_name_is_read_and_all_variables_where_names_are_unknown(source: str) -> None:
    found = variables_read([source.encode()], ENVIRON)
    if source in ANY:
        assert found.pop(ALL) == ALL
        assert found.keys() == {"BONUS", "OTHER", "JUDGE_API_KEY"}
        assert "planted" not in str(found)
        assert (found["JUDGE_API_KEY"], found["BONUS"]) == (SECRET, BONUS)
    else:
        assert found == {"BONUS": BONUS}
        assert variables_read([source.encode()], {}) == {"BONUS": UNSET}
    assert "0.25" not in str(found)


def test_what_is_only_written_or_mentioned_is_not_read() -> None:
    source = b'"""Reads no environ, nor getenv."""\nimport os\nos.environ["X"] = "1"  # environ["BONUS"]\n'
    assert variables_read([source], ENVIRON) == {}


@settings(max_examples=40)
@given(st.text(alphabet="os.environgetv[]()'\"=,: \n\\x00é", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(variables_read([f"environ{text}".encode()], ENVIRON), dict)


@pytest.mark.parametrize("is_resumed", first_or_long([True, False]))
def test_a_changed_variable_is_named_by_compare_without_its_value(
    is_resumed: bool, run: Callable[..., Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = project / "mine/helpers.py"
    helpers.write_text(f"import os\nBONUS = os.environ.get('MY_BONUS', 'none')\n{helpers.read_text()}")
    monkeypatch.setenv("MY_BONUS", "unspeakable-1")
    if not is_resumed:
        (project / "stop").unlink()
    assert run("--log-dir", "logs/a").code == (75 if is_resumed else 0)
    monkeypatch.setenv("MY_BONUS", "unspeakable-2")
    if is_resumed:
        assert run("--resume", "logs/a").code == 0
    assert run("--log-dir", "logs/b", "--seed", "2").code == 0
    told = json.loads(run("compare", "logs/a", "logs/b", "--json").out)["undeclared"]
    words = "resumed at step 2 although environment variable MY_BONUS changed" if is_resumed else "MY_BONUS changed"
    assert any(words in line for line in told), told
    files = (file for file in (project / "logs").rglob("*") if file.is_file())
    assert not [file for file in files if b"unspeakable" in file.read_bytes()]
