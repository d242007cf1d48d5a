"""Right answers in the forms that people and models write, near misses, and the rewrites that tell them apart."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import Example
from retrain_rewards.answers import rewrites, text
from retrain_rewards.answers.notation import notation_of
from retrain_rewards.answers.rewrites import Rewrite
from retrain_rewards.answers.statements import as_set, decimals, spellings, without_names
from retrain_rewards.answers.text import plain
from retrain_rewards.boxed import boxed
from retrain_rewards.verifiers.math_reward import MathReward
from tests.kit.tables import cells

FORMS = tomllib.loads(Path(__file__).with_name("answer_forms.toml").read_text(encoding="utf-8"))
PAIRS = [
    (reference, answer, float(verdict == "right"))
    for family in FORMS.values()
    for verdict in ("right", "wrong")
    for reference, answer in family[verdict]
]
GROUPS = [value for module in (text, rewrites) for value in vars(module).values()]
REWRITES = {
    each: None
    for value in GROUPS
    for each in (value if isinstance(value, tuple) else (value,))
    if isinstance(each, Rewrite)
}
QUICK = 9  # every ninth pair, where all of them take half a minute


@pytest.fixture(scope="module")
def reward() -> MathReward:
    made = MathReward(time_limit_s=8.0)
    made.prepare()
    return made


def value(reward: MathReward, reference: str, answer: str) -> float | None:
    return reward.score(Example(id="e", prompt="", reference=reference), f"So {boxed(answer)}.").value


def failures(reward: MathReward, pairs: list[tuple[str, str, float]]) -> list[tuple[str, str, float | None]]:
    scored = [(reference, answer, value(reward, reference, answer), wanted) for reference, answer, wanted in pairs]
    return [(reference, answer, got) for reference, answer, got, wanted in scored if got != wanted]


def test_right_forms_score_1_and_near_misses_0(reward: MathReward) -> None:
    assert failures(reward, PAIRS[::QUICK]) == []


@pytest.mark.long
def test_all_right_forms_score_1_and_all_near_misses_0(reward: MathReward) -> None:
    assert failures(reward, PAIRS) == []


@pytest.mark.parametrize("each", REWRITES, ids=lambda each: each.example[0])
def test_each_rewrite_does_what_its_example_says(each: Rewrite) -> None:
    before, after = each.example
    assert each(before) == after != before


@pytest.mark.parametrize(
    "formula",
    cells(r"""
        5  -5  x^2 - 1  \frac{1}{2}  1,2  (1,2)  [1,2)  \sqrt{2}  x = 5  n!  \pi r^2  2^{10}
        \begin{pmatrix}1\\2\end{pmatrix}  \{1, 2\}  \$5  50\%  f(x) = x^2  3:4  A  10^{-3}
    """),
)
def test_plain_mathematics_is_left_as_it_is(formula: str) -> None:
    assert plain(formula).replace("{", "").replace("}", "").replace(" ", "") == (
        formula.replace("{", "").replace("}", "").replace(" ", "")
    )
    for each in ("x", "5", "xy", "n^2", "F_{10}", "a_{2}", r"\sin x", r"\frac{1}{2}", "(x)", "3:4"):
        assert notation_of(each) is None, "no words, choice or numeral"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (r"1 < x \le 2", ("x", "(1,2]")),
        (r"3 \ge x", ("x", r"(-\infty,3]")),
        (r"x<-1 \text{ or } x>2", ("x", r"(-\infty,-1) \cup (2,\infty)")),
        (r"|t| > \frac{1}{2}", ("t", r"(-\infty,-\frac{1}{2}) \cup (\frac{1}{2},\infty)")),
        (r"x \ne 3", ("x", r"\mathbb{R} \setminus \{3\}")),
        ("1 < x > 2", ("", "")),
        ("x < y", ("", "")),
        ("x = 3", ("", "")),
        (r"x<1 \text{ or } y>2", ("", "")),
    ],
)
def test_inequalities_of_one_letter_are_sets(statement: str, expected: tuple[str, str]) -> None:
    assert as_set(statement) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"0123456789{}()[]$.,;:%^_ -+/*=<>|xeA√½²°" + "\\",
                *(r"\text{", r"\pm", r"\overline{", r"\begin{cases}", r"\\", r"\frac", r"\mathrm{", r"\langle"),
                *(r"\text{ or }", r"\le ", r"\left(", "km", " or ", "1,200", "..."),
            ]
        ),
        max_size=25,
    )
)
def test_any_text_is_rewritten_without_an_error(parts: list[str]) -> None:
    text = "".join(parts)
    for read in (plain, notation_of, as_set):
        read(text)
    assert isinstance(plain(plain(text)), str)


@pytest.mark.parametrize(
    "unit",
    [
        *cells(r"""
        \text{  \text{a}  {  }  1,  1,000,  .  ;  \sqrt(  √(  \frac{1}  km  *  \mathrm{  \pm  \left(  x<
        \begin{cases}  \begin{array}{c}  0.  0.1(  \text{a:}  9 9/  (A)  1:  ^2  \text{ km}^2  5/  ]  <
        \text{Answer:}  `  \,  \dot1  \mathbf{i}+  , k \in \mathbb{Z}  \text{ or }1  1 \approx 1.
    """),
        "1 ",
        r"\\",
        "km ",
        " or ",
        "a ",
        r"\cup ",
        "\\ ",
        "one hundred and ",
        " of the",
    ],
)
def test_a_text_of_the_greatest_length_is_rewritten_at_once(unit: str) -> None:
    text = unit * (1000 // len(unit))  # a pattern that backtracks exponentially would not come back
    for read in (plain, notation_of, as_set):
        read(text)
        read(text + "!")
    spellings(text), decimals(text), without_names(text, "5")
