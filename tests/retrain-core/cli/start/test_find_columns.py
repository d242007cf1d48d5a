"""Which columns hold prompt and answer: by name, by content, in chats; and what is said where rows do not decide it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from retrain.cli.start.own_data import Columns, find_columns
from retrain.kernel.errors import ConfigError

USER = {"role": "user", "content": "What is 2 + 2?"}
LONG = "A train leaves at nine and arrives at noon. How long does it take?"
FOUND: list[tuple[Mapping[str, Any], tuple[str, str, Mapping[str, Any]]]] = [
    ({"prompt": "q", "answer": "1"}, ("prompt", "answer", {})),
    ({"id": 7, "Question": "q", "Final Answer": 1}, ("Question", "Final Answer", {})),
    ({"problem": "p", "solution": "long", "answer": "1"}, ("problem", "answer", {})),
    ({"problem": "p", "solution": r"so \boxed{1}"}, ("problem", "solution", {"extract": "boxed"})),
    ({"question": "q", "answer": "2+2\n#### 4"}, ("question", "answer", {"extract": "hashes"})),
    ({"a": LONG, "b": 3}, ("a", "b", {})),
    ({"story": LONG, "hint": "h", "label": "3"}, ("story", "label", {})),
    (
        {"prompt": [USER], "reward_model": {"ground_truth": "4", "style": "rule"}},
        ("prompt", "reward_model.ground_truth", {}),
    ),
    ({"data": {"question": "q", "answer": "1"}}, ("data.question", "data.answer", {})),
    ({"messages": [USER], "answer": "4"}, ("messages", "answer", {})),
    ({"messages": [USER, {"role": "assistant", "content": "4"}]}, ("messages", "", {"answer_in_chat": True})),
    (
        {"messages": [USER, {"role": "assistant", "content": r"\boxed{4}"}]},
        ("messages", "", {"answer_in_chat": True, "extract": "boxed"}),
    ),
]
UNSURE = [
    ({"a": "short text", "b": "other text", "answer": "1"}, "the prompt", "--prompt-key"),
    ({"prompt": "q", "x": "1", "y": "2"}, "the answer", "--answer-key"),
    ({"prompt": "q"}, "the answer", "--answer-key"),
    ({"prompt": "q", "answer": [1]}, "the answer", "--answer-key"),
    ({"prompt": 3, "answer": 1}, "the prompt", "--prompt-key"),
    ({}, "the prompt", "--prompt-key"),
]


def found(row: Mapping[str, Any], **given: str) -> Columns:
    return find_columns([row] * 3, where="--data x", **given)


@pytest.mark.parametrize(("row", "expected"), FOUND)
def test_columns_are_found(row: Mapping[str, Any], expected: tuple[str, str, Mapping[str, Any]]) -> None:
    columns = found(row)
    assert (columns.prompt, columns.answer, columns.options) == expected


@pytest.mark.parametrize(("row", "what", "flag"), UNSURE)
def test_where_rows_do_not_decide_the_flag_that_does_is_named(row: Mapping[str, Any], what: str, flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(row)
    told = str(caught.value)
    assert f"cannot tell which column holds {what}" in told
    assert f"fix: name it: {flag} COLUMN" in told
    assert all(f"{name} (" in told for name in row)


def test_what_is_given_is_taken() -> None:
    row = {"prompt": "q", "answer": "1", "other": LONG, "gold": "2"}
    columns = found(row, prompt="other", answer="gold")
    assert (columns.prompt, columns.answer) == ("other", "gold")
    assert columns.told == ("prompt: column 'other' (--prompt-key)", "answer: column 'gold' (--answer-key)")
    assert found(row).told[1] == "answer: column 'answer' (by its name); 'gold' would do as well: --answer-key decides"


def test_a_programs_tests_may_be_lists_and_objects_and_a_solution_may_stand_beside_them() -> None:
    pairs: dict[str, Any] = {"inputs": ["1"], "outputs": ["2"]}
    for row, answer, tests in (
        ({"prompt": "q", "answer": "print(1)", "tests": ["assert f() == 1"]}, "answer", "tests"),
        ({"question": "q", "input_output": pairs, "solution": "def f(): ..."}, "solution", "input_output"),
        ({"prompt": "q", "info": {"test_cases": [pairs]}, "id": 3}, "info.test_cases", "info.test_cases"),
    ):
        columns = find_columns([row], where="x", by_tests=True)
        assert (columns.answer, columns.tests, columns.options) == (answer, tests, {})
    with pytest.raises(ConfigError, match="cannot tell which column holds the tests of a program"):
        find_columns([{"prompt": "q", "answer": "a"}], where="x", by_tests=True)


def test_a_table_of_many_columns_is_not_listed_whole() -> None:
    with pytest.raises(ConfigError, match=r"c19 .*, 80 more") as caught:
        found({f"c{number}": number for number in range(100)})
    assert "c20" not in str(caught.value)


def test_hostile_names_and_values_are_shown_without_their_control_characters() -> None:
    with pytest.raises(ConfigError) as caught:
        found({"\x1b[2J": "\x1b[31m" * 9, "b": "\x1b[31m" * 8})
    assert "\x1b" not in str(caught.value)


def test_answers_with_formulas_call_for_mathematics() -> None:
    assert [found({"prompt": "q", "answer": answer}).has_formulas for answer in (r"\pi", "1/2", "7", "cat")] == [
        *(True, True),
        *(False, False),
    ]
