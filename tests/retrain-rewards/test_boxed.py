from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_rewards.boxed import last_boxed
from tests.kit.shared import first_or_long
from tests.kit.tables import cells, pairs


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *pairs(r"""
        so \boxed{5} => 5  \boxed{1} then \boxed{2} => 2  \boxed{\frac{1}{2}} => \frac{1}{2}
        \boxed { 7 } => 7  \fbox{8} => 8  \boxed 5 => 5  It is \boxed 5. => 5
        It is \boxed 5.25, I think. => 5.25  $\boxed -3$ is it => -3  \(\boxed 4\) => 4  \[\fbox 9\] => 9
        \boxed5 => 5  {\boxed 5} and more => 5  \boxed\frac{1}{2} done => \frac{1}{2}
        \boxed \text{a b}. => \text{a b}  \boxed{\{1, 2\}} => \{1, 2\}
        \boxed{\left\{ x \right.} => \left\{ x \right.  \boxed{\boxed{b}} => b  \boxed{ $\fbox{b}$. } => b
        \boxed{\boxed b} => b  \boxed{a \boxed{b} => b  \boxed{a} then \boxed{\{b\}} => \{b\}
        \boxed 5 apples, I think. => 5  \boxed{a}\fbox{b} => b  \boxed{} =>  \\boxed{6} => 6
    """),
        ("\\boxed 5\n\n6 more lines", "5"),
        ("\\boxed{two\nlines}", "two\nlines"),
        ("\\boxed{\x00\u202e5}", "\x00\u202e5"),
    ],
)
def test_finds_the_last_box(text: str, answer: str) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        *cells(r"""
        no box, just 5  boxed{5}  \boxedanswer{5}  \framebox{5}  \boxed{5  \boxed{5\}
        \boxed{1} but then \boxed{2  \boxed  \boxed}  \boxed $5$  \boxed .  \boxed \frac{1
        \boxed{a \boxed{b} c}  \boxed{\boxed{5} or 6}  \boxed{6, \boxed{5}}  \boxed{\boxed{5}, \boxed{6}}
        \boxed{\boxed{5}\boxed{6}}  \boxed{not \boxed 5}  \boxed 5, 6  \boxed 5 or 6  \boxed 5 + 6
        \boxed 5 \text{ or } 6  \boxed 5 million
    """),
        "",
        r"\boxed ",
        "\\",
    ],
)
def test_no_answer(text: str) -> None:
    assert last_boxed(text) is None


@pytest.mark.parametrize(
    ("unit", "answer"),
    first_or_long(
        [
            (r"\boxed{", None),
            (r"\boxed", None),
            (r"\fboxed", None),
            (r"\boxed ", None),
            ("{", None),
            ("\\", None),
            (r"\boxed{\}", None),
            (r"\boxed{1}", "1"),
        ]
    ),
)
def test_a_megabyte_of_hostile_text_is_read_in_linear_time(unit: str, answer: str | None) -> None:
    # Anything quadratic would take hours here and run into the suite's time limit.
    assert last_boxed(unit * (1_000_000 // len(unit))) == answer
    assert last_boxed(r"\boxed{" + "{" * 500_000 + "}" * 500_000 + "}") == "{" * 500_000 + "}" * 500_000


def _simple_group(text: str, start: int) -> str | None:
    """What stands between the braces whose first one ends at `start`, one character at a time."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start:index]
        index += 1
    return None


def _simple_answer(text: str) -> str | None:
    """The last box, unless one around it holds anything else."""
    starts = [match.end() for match in re.finditer(r"\\boxed\{", text)]
    answer = _simple_group(text, starts[-1]) if starts else None
    if answer is None:
        return None
    for start in starts[:-1]:
        around = _simple_group(text, start)
        if around is not None and start + len(around) > starts[-1]:
            beside = around[: starts[-1] - start], around[starts[-1] - start + len(answer) :]
            if re.sub(r"\\boxed\{|[\s$]", "", beside[0]) or re.sub(r"[\s$}]", "", beside[1]):
                return None
    return answer.strip()


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "\\", "a", " ", "\n", "$"]), max_size=30))
def test_brace_matching_agrees_with_a_simple_reader(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert last_boxed(text) == _simple_answer(text)


@given(st.text(alphabet=st.characters(exclude_characters="\\{}", exclude_categories=["Cs"])), st.text())
def test_a_box_put_at_the_end_is_found_whatever_stands_before(answer: str, before: str) -> None:
    assert last_boxed(f"{before}\\boxed{{{answer}}}") == answer.strip()


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    found = last_boxed(text)
    assert found is None or found in text
