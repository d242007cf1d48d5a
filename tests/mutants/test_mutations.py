"""The mutants themselves: each is one change, and words of errors, annotations and docstrings have none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.hook import VARIABLE
from tests.mutants.mutations import mutant, sites


def changes(body: str) -> set[tuple[str, str]]:
    """Return what the mutants of a function's body change, before and after."""
    source = f"def f(a, b):\n    {body}\n"
    found = (mutant(source, *site) for site in sites(source))
    return {(each.before, each.after) for each in found}


@pytest.mark.parametrize(
    ("body", "change"),
    [
        ("g(a < b)", ("a < b", "a <= b")),
        ("g(a + b)", ("a + b", "a - b")),
        ("g(a and b)", ("a and b", "a or b")),
        ("g(a and b)", ("a and b", "a")),
        ("g(not a)", ("not a", "not not a")),
        ("g(-a)", ("-a", "+a")),
        ("g(1)", ("1", "2")),
        ("g(True)", ("True", "False")),
        ("g(a if a else b)", ("a if a else b", "a if not a else b")),
        ("g(min(a, b))", ("min(a, b)", "max(a, b)")),
        ("return a", ("return a", "return None")),
        ("a += b", ("a += b", "a -= b")),
        ("g(a)", ("g(a)", "None")),
    ],
)
def test_a_mutant_is_one_change(body: str, change: tuple[str, str]) -> None:
    assert change in changes(body)


@pytest.mark.parametrize(
    "body",
    [
        '"""1 < 2"""',
        "raise ValueError(a + 1)",
        "x: 'int | 2'",
        "'a' + 'b'",
        "f'{a + 1}'",
        "import os",
        "assert a < b",
        "a = zip(b, strict=True)",
    ],
)
def test_words_and_annotations_have_none(body: str) -> None:
    assert not changes(body)


def test_a_mutant_is_loaded_in_place_of_its_module_in_child_processes(tmp_path: Path) -> None:
    (tmp_path / "original.py").write_text("VALUE = 1\n", encoding="utf-8")
    (tmp_path / "mutant.json").write_text(json.dumps({"module": "original", "source": "VALUE = 2"}), encoding="utf-8")
    code = "import tests.mutants.hook, original; print(original.VALUE, original.__file__)"
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    environ = os.environ | {VARIABLE: str(tmp_path / "mutant.json"), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", str(tmp_path / "original.py")]
