"""Every error that a user can meet says what is wrong and how to mend it: read off the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.kernel import errors
from tests.kit.shared import first_or_long

ROOT = Path(__file__).parents[2]
KINDS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
REASONS = {"RewardError"}  # raised by a reward for one text: scoring quotes it as a reason, and says the fix itself


def faults(source: str) -> Iterator[str]:
    """Each `Problem(...)` without what and fix, and each error of ours that is raised with bare text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name, given = node.func.id, {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "Problem" and None not in given:  # `**fields` is checked where the fields are made
            missing = {"what", "fix"} - {key for key, value in given.items() if not _is_empty(value)}
            if missing:
                yield f"line {node.lineno}: Problem without {' and '.join(sorted(missing))}"
        if name in KINDS - REASONS and (not node.args or any(map(_is_text, node.args))):
            yield f"line {node.lineno}: {name} with bare text"


def _is_empty(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


@pytest.mark.parametrize(
    "distribution", first_or_long(sorted(path.name for path in ROOT.glob("retrain-*") if path.is_dir()))
)
def test_every_problem_comes_with_its_fix(distribution: str) -> None:
    found = []
    for file in sorted((ROOT / distribution / "src").rglob("*.py")):
        if file != ROOT / "retrain-core/src/retrain/kernel/errors.py":
            found += [f"{file.relative_to(ROOT)} {fault}" for fault in faults(file.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("raise ConfigError(Problem(what='x', fix='y'))", 0),
        ("raise ConfigError(Problem(what='x'))", 1),
        ("raise ConfigError(Problem(what='x', fix=''))", 1),
        ("raise BackendError(f'{x} is bad')", 1),
        ("raise BackendError()", 1),
        ("raise BackendError(*problems)", 0),
        ("raise ValueError('for programmers')", 0),
    ],
)
def test_the_reader_finds_what_it_is_for(source: str, count: int) -> None:
    assert len(list(faults(source))) == count
