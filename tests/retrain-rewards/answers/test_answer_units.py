from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_rewards.answers.units import NO_UNIT, dropped, objection_to_words
from tests.kit.tables import pairs

HARMLESS = pairs(r"""
    5\text{ cm} => 5  5 => 5\text{ cm}  5\text{ cm} => 5\text{ centimeters}  5 cm => 5\,\mathrm{cm}
    12\text{ square inches} => 12\text{ in}^2  50\text{ mph} => 50\text{ miles per hour}  \$5 => 5
    5\text{ dollars} => \$5  90^\circ => 90\text{ degrees}  90 => 90^{\circ}  5\% => 5\text{ percent}
    9.8\text{ m/s}^2 => 9.8  5 => 5\text{ kJ}  6 => 6\text{ pairs of socks}  6 => 6\text{ people}
    \text{Evelyn} => evelyn  \text{not enough} => \text{Not enough}  A => \text{(A)}  5 => \text{Area} = 5
""")
HARMFUL = pairs(r"""
    1 => 1\text{ million}  1 => 1\text{ dozen}  1 => 1\text{ or so}  1 => 1\text{ not}  1 => 1\text{, 2}
    3\text{ million} => 3  2t => 2  2 => 2t  5\text{ m} => 5\text{ km}  5\text{ cm} => 5\%
    5\text{ cm} => 5\text{ cm}^2  \$5 => 5\text{ euros}  5\text{ a.m.} => 5\text{ p.m.}
    5 => 5\text{ squared}  5 => 5\text{ floops}  5 => 5\text{ a }6\text{ b}  5 => \text{not } = 5
    5 => \text{roughly }5  5 => 5 no change  5\text{ floops} => 5\text{ cm}  5 => 5\text{ prime}
    2 => 2\text{ per}
""")


@pytest.mark.parametrize(("reference", "answer"), HARMLESS)
def test_units_that_agree_or_are_left_out(reference: str, answer: str) -> None:
    assert objection_to_words(reference, answer, "") == ""


@pytest.mark.parametrize(("reference", "answer"), HARMFUL)
def test_other_units_and_words_are_refused(reference: str, answer: str) -> None:
    assert objection_to_words(reference, answer, "")


def test_words_of_the_prompt_are_units_unless_they_change_the_value() -> None:
    assert objection_to_words("5", r"5\text{ floops}", "How many floops are there?") == ""
    assert objection_to_words("5", r"5\text{ million}", "How many million floops are there?")


# `and` and `or` separate values for math-verify, and `percent` is its sign: they do not end up in what it drops.
@given(
    st.sampled_from(sorted(NO_UNIT - {"and", "or", "percent"})), st.sampled_from(["cm", "apples", ""]), st.booleans()
)
def test_no_unit_has_a_word_that_changes_the_value(word: str, unit: str, first: bool) -> None:
    words = f"{word} {unit}" if first else f"{unit} {word}"
    assert objection_to_words("5", rf"5\text{{ {words}}}", f"How many {word} {unit} are there?")


def test_what_math_verify_drops_is_the_end_alone() -> None:
    assert dropped(r"5\text{ cm}") == r"\text{ cm}"
    assert dropped("5 apples") == "apples"
    assert dropped(r"x^2 + 1") == dropped(r"\text{Evelyn}") == ""


@given(st.text(max_size=40), st.text(max_size=20))
def test_any_text_is_survived(answer: str, prompt: str) -> None:
    assert isinstance(objection_to_words("5", answer, prompt), str)
