"""Codes of problems: `retrain help CODE`, and that no problem is without one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from retrain.cli.command_line import run
from retrain.cli.manual.problems import CODE, known_problems
from tests.kit.problems import codes_in

SOURCES = Path(__file__).parents[4]


def test_every_problem_in_the_sources_has_a_code() -> None:
    without = []
    for file in SOURCES.glob("retrain-*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                named = {each.arg for each in node.keywords}
                if "code" not in named and file.name != "errors.py":  # where a plain string becomes a problem
                    without.append(f"{file.relative_to(SOURCES)}:{node.lineno}")
    assert not without


def test_every_code_has_its_form_and_says_what_is_wrong() -> None:
    known = known_problems()
    assert len(known) > 300
    assert not [code for code in known if not CODE.fullmatch(code)]
    assert not [code for code, texts in known.items() if not texts["what"]]


def test_help_explains_a_code_and_refuses_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "help.unknown-code"]) == 0
    assert "[help.unknown-code]" in capsys.readouterr().out
    assert run(["help", "help.unknown-cod"]) == 2
    refused = capsys.readouterr().err
    assert codes_in(refused) == ["help.unknown-code"]
    assert "fix: one of: help.unknown-code" in refused


@pytest.mark.parametrize("said", ["a [b.c]\n    fix: d", "1. x: y [b.c]\n2. [training] lr: z"])
def test_codes_are_found_on_a_console(said: str) -> None:
    assert codes_in(said) == ["b.c"]
