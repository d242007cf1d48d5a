"""Which modules of a project a module imports, found in its text alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retrain.records.identity.code import ImportGraph

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
