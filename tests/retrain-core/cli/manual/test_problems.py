"""Codes of problems: each has a cause and a fix in the reference, wherever the source writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrain.cli.command_line import run
from retrain.cli.manual import problems
from retrain.cli.manual.problem_texts import CODE, problems_in
from tests.kit.problems import codes_in

SOURCES = Path(__file__).parents[4]


Place = tuple[str, dict[str, str]]


@pytest.fixture(scope="module")
def places() -> list[Place]:
    """Every place with a code in the sources of all distributions, installed or not."""
    return problems.places_of_codes(SOURCES.glob("retrain-*/src"))


@pytest.fixture(scope="module")
def known(places: list[Place]) -> problems.Explained:
    return problems.explained(places)


def test_every_problem_in_the_sources_has_a_code() -> None:
    without = []
    for file in SOURCES.glob("retrain-*/src/**/*.py"):
        text = file.read_text(encoding="utf-8")
        if file.name == "errors.py":  # where a plain string becomes a problem
            continue
        for call in re.finditer(r"\bProblem\((?=[^)])", text):
            depth, end = 1, call.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            if not re.search(r"\bcode=|\*\*", text[call.end() : end]):
                without.append(f"{file.relative_to(SOURCES)}: {text[call.start() : end]}")
    assert not without


def test_every_code_has_a_cause_and_a_fix(known: problems.Explained) -> None:
    assert len(known) > 700
    assert not [code for code in known if not CODE.fullmatch(code)]
    assert not [code for code, texts in known.items() if not texts["what"] or not texts["fix"]]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{4,}", re.sub(r"\{[^}]*\}", "", text.lower()))) - {"with", "that", "cannot", "have"}


def test_a_code_has_one_meaning(places: list[Place], known: problems.Explained) -> None:
    """Each of its places shares a word with another one or with the code, and no two codes say the same."""
    said: dict[str, list[set[str]]] = {}
    for code, texts in ((code, texts) for code, texts in places if texts.get("what")):
        said.setdefault(code, [_words(code)]).append(_words(" ".join(texts.values())))
    unrelated = [
        (code, words)
        for code, each in said.items()
        for index, words in enumerate(each[1:], start=1)
        if len(each) > 2 and words.isdisjoint(set().union(*each[:index], *each[index + 1 :]))
    ]
    assert not unrelated
    texts_of_codes = [str(texts) for texts in known.values()]
    assert len(texts_of_codes) == len(set(texts_of_codes))


def test_help_prints_cause_and_fix_of_every_code(known: problems.Explained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "known_problems", lambda: known)
    for code in known:
        head, *lines = problems.explanation(code).splitlines()
        assert head == f"[{code}]"
        assert {"what", "fix"} <= {line.split()[0] for line in lines if line.split()[1:]}


def test_help_explains_a_code_and_refuses_an_unknown_one(
    known: problems.Explained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(problems, "known_problems", lambda: known)
    assert run(["help", "help.unknown-code"]) == 0
    assert "[help.unknown-code]" in capsys.readouterr().out
    assert run(["help", "help.unknown-cod"]) == 2
    refused = capsys.readouterr().err
    assert codes_in(refused) == ["help.unknown-code"]
    assert "fix: one of: help.unknown-code" in refused


@pytest.mark.parametrize("said", ["a [b.c]\n    fix: d", "1. x: y [b.c]\n2. [training] lr: z"])
def test_codes_are_found_on_a_console(said: str) -> None:
    assert codes_in(said) == ["b.c"]


READ = """
FIX = "remove it"

def refuse(what, fix="", *, code, where=""):
    return ConfigError(Problem(code=code, where=where, what=f"the run {what}", fix=fix or "try again"))

def hint(name):
    if name:
        return f"did you mean {name}?"
    return "see the list"

def check(name, error, is_old):
    if is_old:
        what, fix = f"no {name!r}", "update"
    elif name:
        what, fix = "too new", "wait"
    else:
        what = "unused"
        return
    Problem(code="x.branches", what=what, fix=fix)
    Problem(code="x.function", what=f"unknown {name}", fix=hint(name))
    Problem(code="x.either", what=f"bad: {error.reason or error}", fix=FIX)
    refuse("failed", code="x.helper")
    refuse(f"lost {name}", "look for it", code="x.position")
"""


def test_texts_are_found_where_the_source_writes_them() -> None:
    texts = dict(problems_in(READ))
    assert texts["x.branches"] == {"what": "no {name} / too new", "fix": "update / wait"}
    assert texts["x.function"]["fix"] == "did you mean {name}? / see the list"
    assert texts["x.either"] == {"what": "bad: {reason} / {error}", "fix": "remove it"}
    assert texts["x.helper"] == {"what": "failed", "fix": "try again"}
    assert texts["x.position"] == {"what": "lost {name}", "fix": "look for it"}
