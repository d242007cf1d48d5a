"""Which texts an audit tries: the right answers as far as they are known, and wrong ones that are never right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.types import Example
from retrain.tasks.audit import probes

FIVE = (r"\boxed{5}", "5", "#### 5", "<answer>5</answer>")


class Says:
    """A reward whose `gold` returns, or raises, one thing."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def gold(self, example: Example) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def task(reference: str, prompt: str = "p") -> Example:
    return Example(id="e", prompt=prompt, reference=reference)


@pytest.mark.parametrize(
    ("rewards", "reference", "gold"),
    [
        ([], "5", probes.Gold(texts=FIVE)),
        ([object()], " 5 ", probes.Gold(texts=FIVE)),
        ([object()], "", probes.Gold()),
        ([Says("it is 5")], "5", probes.Gold(texts=("it is 5",), is_declared=True)),
        ([Says("a"), object(), Says("b"), Says("a"), Says(None)], "5", probes.Gold(texts=("a", "b"), is_declared=True)),
        ([Says(None)], "5", probes.Gold(texts=FIVE, is_required=False)),
        ([Says(None)], "", probes.Gold(is_required=False)),
        ([Says(KeyError("x"))], "5", probes.Gold(fault="gold() raised KeyError: 'x'")),
        ([Says(5)], "5", probes.Gold(fault="gold() returned a int, not text or None")),
    ],
)
def test_the_right_answer_is_what_the_rewards_say_or_else_the_reference(
    rewards: list[object], reference: str, gold: probes.Gold
) -> None:
    assert probes.gold_of(rewards)(task(reference)) == gold


SAME = [("1", "1"), ("1", "1.0"), ("True", "TRUE"), ("True", "yes"), ("VERDICT: yes", "Yes"), ("correct", "Correct.")]
OTHER = [("1", "11"), (r"\boxed{}", "1"), ("True", "no"), ("1", "")]


@settings(max_examples=40)
@given(st.text(max_size=30), st.text(max_size=30))
def test_no_wrong_text_is_the_answer_alone(prompt: str, reference: str) -> None:
    example = task(reference, prompt)
    for gold in (
        probes.gold_from_reference(example),
        probes.Gold(texts=(rf"\boxed{{{reference}}}",), is_declared=True),
    ):
        made = list(probes.wrong_texts(example, gold, [prompt]))
        texts = [probe.text for probe in made if probe.check in ("repeated", "hack")]
        assert not reference.strip() or reference.strip() not in texts
        assert {probe.check for probe in made} >= {"empty", "repeated", "echo"}
        assert all(probe.message and probe.fix for probe in made)


def texts_of(
    gold: probes.Gold, reference: str, prompt: str = "p", plausible: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for probe in probes.wrong_texts(task(reference, prompt), gold, [prompt], plausible):
        found.setdefault(probe.check, []).append(probe.text)
    return found


def test_what_is_no_falsehood_or_has_no_form_is_not_tried() -> None:
    for gold, severity in (
        (probes.Gold(texts=(r"\boxed{5}",), is_declared=True), "error"),
        (probes.Gold(texts=(r"\boxed{5}", "5")), "warning"),
        (probes.Gold(texts=("so 5",), is_declared=True), "warning"),
    ):
        found = [probe.severity for probe in probes.wrong_texts(task("5"), gold, []) if probe.check == "misplaced"]
        assert found == [severity] * 2
    for gold in (probes.Gold(), probes.Gold(texts=("a program",), is_declared=True)):
        assert not {"restated", "listed", "hedged", "negated", "scaled"} & set(texts_of(gold, "5", "2 + 3"))
    boxed_zero = probes.Gold(texts=(r"\boxed{0}",), is_declared=True)
    assert "scaled" not in texts_of(boxed_zero, "0")  # a million times 0
    assert texts_of(boxed_zero, "0", "0")["echo"] == ["0"]  # a prompt that is the answer


@settings(max_examples=40)
@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=9), max_size=5), st.text(max_size=30))
def test_no_wrong_answer_is_the_right_one(reference: str, plausible: list[str], prompt: str) -> None:
    gold = probes.gold_from_reference(task(reference))
    for form in gold.texts:
        found = texts_of(gold.confirmed([form]), reference.strip(), prompt, tuple(plausible))
        for check in ("restated", "listed", "hedged", "negated", "scaled"):
            assert form not in found.get(check, [])


@pytest.mark.parametrize(
    ("prompt", "reference", "found"),
    [
        ("What is 348 + 217?", "565", ["348 + 217"]),
        ("State the final answer to: ((3 - 4) * (2 + 1)) - 5.", "-8", ["((3 - 4) * (2 + 1)) - 5"]),
        ("12,345 + 1,000 = ?", "13345", ["12,345 + 1,000"]),
        ("What is -6 - -3?", "-3", ["-6 - -3"]),
        ("What is 3 x 4?", "12", ["3 x 4"]),
        ("What is 2 ** 10?", "1024", ["2 ** 10"]),
        (r"Evaluate \(\int_0^1 x^2 dx\).", "1/3", [r"\int_0^1 x^2 dx"]),
        (r"Find \[\sum_{k=1}^{100} k\]", "5050", [r"\sum_{k=1}^{100} k"]),
        (r"Find $\gcd(12, 18)$ or $$\binom{5}{2}$$", "6", [r"\gcd(12, 18)", r"\binom{5}{2}"]),
        ("Solve $x^2 - 4 = 0$ for $x > 0$.", "2", ["x^2 - 4 = 0"]),
        ("Factor $x^2-1$.", "x^2 - 1", []),  # the reference itself
        ("Given $a+b = 7$, what is $a+b$?", "7", ["a+b"]),
        ("It costs $5 and $7 in total.", "12", []),
        ("How many days have 3 weeks?", "21", []),
        ("", "5", []),
    ],
)
def test_expressions_of_a_prompt_in_which_something_is_left_to_compute(
    prompt: str, reference: str, found: list[str]
) -> None:
    assert probes.expressions(prompt, reference) == found
    for text, meant in SAME + OTHER:
        assert probes.says_the_same(text, meant) == ((text, meant) in SAME)


@settings(max_examples=40)
@given(st.text(alphabet="1 2+-*/()$\\[]{}x^=.,frac", max_size=60), st.text(alphabet="0123456789abcx+ ", max_size=12))
def test_any_prompt_gives_few_and_never_the_reference(prompt: str, reference: str) -> None:
    found = probes.expressions(prompt, reference)
    assert len(found) <= probes.MOST
    assert "".join(reference.split()) not in ["".join(text.split()) for text in found]
    words = probes.repeated(reference).split()
    assert (len(words), words[0] in reference) == (probes.REPEATS, False)
