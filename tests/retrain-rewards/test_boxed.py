from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_rewards.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed { 7 }", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed 5", "5"),
        (r"It is \boxed 5.", "5"),
        (r"It is \boxed 5.25, I think.", "5.25"),
        (r"$\boxed -3$ is it", "-3"),
        (r"\(\boxed 4\)", "4"),
        (r"\[\fbox 9\]", "9"),
        (r"\boxed5", "5"),
        (r"{\boxed 5} and more", "5"),
        (r"\boxed\frac{1}{2} done", r"\frac{1}{2}"),
        (r"\boxed \text{a b}.", r"\text{a b}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{a}\fbox{b}", "b"),
        (r"\boxed{}", ""),
        ("\\boxed{two\nlines}", "two\nlines"),
        ("\\boxed{\x00\u202e5}", "\x00\u202e5"),
        (r"\\boxed{6}", "6"),
    ],
)
def test_finds_the_last_box(text: str, answer: str) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no box, just 5",
        "boxed{5}",
        r"\boxedanswer{5}",
        r"\framebox{5}",
        r"\boxed{5",
        r"\boxed{5\}",
        r"\boxed{1} but then \boxed{2",
        r"\boxed",
        r"\boxed ",
        r"\boxed}",
        r"\boxed $5$",
        r"\boxed .",
        r"\boxed \frac{1",
        "\\",
    ],
)
def test_no_answer(text: str) -> None:
    assert last_boxed(text) is None


@pytest.mark.parametrize(
    ("unit", "answer"),
    [
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\fboxed", None),
        (r"\boxed ", None),
        ("{", None),
        ("\\", None),
        (r"\boxed{\}", None),
        (r"\boxed{1}", "1"),
    ],
)
def test_a_megabyte_of_hostile_text_is_read_in_linear_time(unit: str, answer: str | None) -> None:
    # Anything quadratic would take hours here and run into the suite's time limit.
    assert last_boxed(unit * (1_000_000 // len(unit))) == answer
    assert last_boxed(r"\boxed{" + "{" * 500_000 + "}" * 500_000 + "}") == "{" * 500_000 + "}" * 500_000


def _simple_group(text: str) -> str | None:
    """What stands between the braces that follow the last box, one character at a time."""
    starts = [match.end() for match in re.finditer(r"\\boxed\{", text)]
    if not starts:
        return None
    depth, index = 1, starts[-1]
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[starts[-1] : index].strip()
        index += 1
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "\\", "a", " ", "\n", "$"]), max_size=30))
def test_brace_matching_agrees_with_a_simple_reader(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert last_boxed(text) == _simple_group(text)


@given(st.text(alphabet=st.characters(exclude_characters="\\{}", exclude_categories=["Cs"])), st.text())
def test_a_box_put_at_the_end_is_found_whatever_stands_before(answer: str, before: str) -> None:
    assert last_boxed(f"{before}\\boxed{{{answer}}}") == answer.strip()


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    found = last_boxed(text)
    assert found is None or found in text
