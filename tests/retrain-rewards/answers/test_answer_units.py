from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_rewards.answers.units import NO_UNIT, dropped, objection_to_words

HARMLESS = (
    *(
        (r"5\text{ cm}", "5"),
        ("5", r"5\text{ cm}"),
        (r"5\text{ cm}", r"5\text{ centimeters}"),
        ("5 cm", r"5\,\mathrm{cm}"),
    ),
    *((r"12\text{ square inches}", r"12\text{ in}^2"), (r"50\text{ mph}", r"50\text{ miles per hour}"), (r"\$5", "5")),
    *(
        (r"5\text{ dollars}", r"\$5"),
        (r"90^\circ", r"90\text{ degrees}"),
        ("90", r"90^{\circ}"),
        (r"5\%", r"5\text{ percent}"),
    ),
    *(
        (r"9.8\text{ m/s}^2", r"9.8"),
        ("5", r"5\text{ kJ}"),
        ("6", r"6\text{ pairs of socks}"),
        ("6", r"6\text{ people}"),
    ),
    *(
        (r"\text{Evelyn}", "evelyn"),
        (r"\text{not enough}", r"\text{Not enough}"),
        ("A", r"\text{(A)}"),
        ("5", r"\text{Area} = 5"),
    ),
)
HARMFUL = (
    *(
        ("1", r"1\text{ million}"),
        ("1", r"1\text{ dozen}"),
        ("1", r"1\text{ or so}"),
        ("1", r"1\text{ not}"),
        ("1", r"1\text{, 2}"),
    ),
    *((r"3\text{ million}", "3"), ("2t", "2"), ("2", "2t"), (r"5\text{ m}", r"5\text{ km}"), (r"5\text{ cm}", r"5\%")),
    *(
        (r"5\text{ cm}", r"5\text{ cm}^2"),
        (r"\$5", r"5\text{ euros}"),
        (r"5\text{ a.m.}", r"5\text{ p.m.}"),
        ("5", r"5\text{ squared}"),
    ),
    *(
        ("5", r"5\text{ floops}"),
        ("5", r"5\text{ a }6\text{ b}"),
        ("5", r"\text{not } = 5"),
        ("5", r"\text{roughly }5"),
    ),
    *(("5", "5 no change"), (r"5\text{ floops}", r"5\text{ cm}"), ("5", r"5\text{ prime}"), ("2", r"2\text{ per}")),
)


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
