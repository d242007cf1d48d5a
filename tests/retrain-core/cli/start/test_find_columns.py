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
    ("prompt", {"a": "short text", "b": "other text", "answer": "1"}),
    ("answer", {"prompt": "q", "x": "1", "y": "2"}),
    ("answer", {"prompt": "q"}),
    ("answer", {"prompt": "q", "answer": [1]}),
    ("prompt", {"prompt": 3, "answer": 1}),
    ("prompt", {}),
]


def found(row: Mapping[str, Any], **given: str) -> Columns:
    return find_columns([row] * 3, where="--data x", **given)


@pytest.mark.parametrize(("row", "expected"), FOUND)
def test_columns_are_found(row: Mapping[str, Any], expected: tuple[str, str, Mapping[str, Any]]) -> None:
    columns = found(row)
    assert (columns.prompt, columns.answer, columns.options) == expected


@pytest.mark.parametrize(("column", "row"), UNSURE)
def test_where_rows_do_not_decide_the_flag_that_does_is_named(column: str, row: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        found(row)
    (problem,) = caught.value.problems
    assert (problem.code, f"--{column}-key" in problem.fix) == (f"data.{column}-column-unclear", True)
    assert all(f"{name} (" in problem.why for name in row)


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
    with pytest.raises(ConfigError) as caught:
        find_columns([{"prompt": "q", "answer": "a"}], where="x", by_tests=True)
    assert caught.value.codes == ["data.answer-column-unclear"]


def test_of_many_columns_some_are_listed_without_control_characters() -> None:
    with pytest.raises(ConfigError, match=r"c18 .*, 81 more") as caught:
        found({"\x1b[2J": "\x1b[31m" * 9} | {f"c{number}": number for number in range(100)})
    assert ("c20" in str(caught.value), "\x1b" in str(caught.value)) == (False, False)


def test_answers_with_formulas_call_for_mathematics() -> None:
    answers = {r"\pi": True, "1/2": True, "7": False, "cat": False}
    assert {answer: found({"prompt": "q", "answer": answer}).has_formulas for answer in answers} == answers
