from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_rewards.answers.form import fingerprint, form_of, is_finished, is_literal, kind_of, reduced
from retrain_rewards.answers.units import NO_UNIT, dropped, objection_to_words
from tests.kit.tables import cells, pairs

FINISHED = cells(r"""
    \ln 1.5  0.5\pi  \begin{pmatrix}1 & 2\end{pmatrix}^T  5  -5  0.25  1,234  1/2  \frac{6}{2}  -\frac{3}{4}
    2\frac{1}{2}  6.63 \times 10^{-34}  10^6  5\%  \infty  2\pi  \frac{2}{3}\pi  \pi^2/6  e^2  e^{-1}
    \frac{1}{2e}  \ln 2  \log_2 3  \sqrt{12}  \frac{\sqrt{2}}{2}  \frac{1}{\sqrt{2}}  \frac{1+\sqrt{5}}{2}
    \sqrt[3]{2}  2^{\frac13}  \arctan 2  3+4i  \sqrt{6}+\sqrt{2}  \sqrt{\sqrt{3}}  4\sqrt{3}-2\pi  90^\circ
    x  A  n!  x^2-1  (x-1)(x+1)  x+\sqrt{12}  \binom{n}{k}  e^{-x^2}  \frac{x}{y}  \frac{x^2}{3^2}  (1, 2)
    [1, 2)  \{1, 2\}  1, 2  \pm 2  (-\infty, 0) \cup (0, \infty)  \mathbb{R}\setminus\{0\}  x = 5
    x^2 + y^2 = 5^2  1 < x < 2  x \in [1, 2)  f(x) = x^2  \emptyset
    \begin{pmatrix}1 & \frac{1}{2}\\3 & 4\end{pmatrix}  \frac{1}{5}\begin{pmatrix}1\\2\end{pmatrix}
""")
UNFINISHED = cells(r"""
    \sqrt{0.25}  \begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}^T  1.5 \cdot 2  348+217  348 217  2(3)  2 \cdot 3
    5^1  2^{10}  5!  -(-5)  |5|  6 \div 2  6:2  5 \mod 3  \sqrt{4}  \sqrt{3+4}  \sqrt{2}+\sqrt{8}
    \sqrt{2}\sqrt{2}  (1+\sqrt{2})^2  \ln e^2  \log_2 8  e^{\ln 5}  \sin\frac{\pi}{6}  \sin\frac{\pi}{3}
    \pi \cdot 3^2  3 \cdot 4\pi  0.5+0.5  \infty+1  \binom{5}{2}  \gcd(4, 6)  \max(1, 5)
    \lfloor 5.5 \rfloor  \Gamma(5)  \phantom{5}  2_3  5^{1}_{3}  \int_0^1 x^2 dx  \sum_{k=1}^{n} k
    \prod_{k=1}^{n} k  \lim_{x \to 0} x  \frac{d}{dx} x^2  \det\begin{pmatrix}1&0\\0&1\end{pmatrix}
    \begin{vmatrix}1&2\\3&4\end{vmatrix}  \begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}3\\4\end{pmatrix}
    \begin{pmatrix}1+3\\6\end{pmatrix}  3x+2x  2 \cdot 3x  x-x  x \cdot x  x^1  x+0  x \cdot 1  \frac{x}{1}
    x = 2+3  (1, 1+1)  \{1+1\}  [1-1, 2]  1+1 < x  [0, 5] \cap [1, 2]  \frac{4!}{2}  \frac{1+3}{2}
    \frac{1}{2} \cdot \frac{2}{3}
""")


@pytest.mark.parametrize("formula", [*FINISHED, *UNFINISHED])
def test_what_still_has_to_be_computed_is_not_finished(formula: str) -> None:
    assert is_finished(form_of(formula)) is (formula in FINISHED)


@pytest.mark.parametrize(
    ("formula", "kind"),
    pairs(r"""
        5 =>  1, 2 => list  \{1\} => {}  (1, 2, 3) => ()  (1, 2) => ()  [1, 2) => [)  (1, 2] => (]
        \left[1, 2\right] => []  x = 5 => =  x \in [1, 2] => =  \{1\} \cup \{2\} => union  x < 1 => <
    """),
)
def test_kinds(formula: str, kind: str) -> None:
    assert kind_of(form_of(formula)) == kind
    for literal, is_one in (("-5", True), (r"-2\frac{1}{2}", True), (r"2\pi", False), ("2+3", False)):
        assert is_literal(form_of(literal)) is is_one
    for no_form in (r"\neq 1", r"\not 5", r"6 \to 5", "5.", r"\foo", "", "5 &"):
        with pytest.raises(Exception, match=r".*"):
            form_of(no_form)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("348 + 217", "217+348", True),
        (r"\frac{6}{2}", "6/2", True),
        (r"\frac{6}{2}", "3", False),
        (r"\dfrac1{\sqrt 2}", r"\frac{1}{\sqrt{2}}", True),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", False),
        ("x^2 - 1", "-1 + x^{2}", True),
        ("x^2 - 1", "(x-1)(x+1)", False),
        ("0.25", r"\frac{1}{4}", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        ("1, 2", r"\{1, 2\}", False),
    ],
)
def test_a_fingerprint_is_that_of_the_form_not_of_the_value(one: str, other: str, equal: bool) -> None:
    assert (fingerprint(form_of(one)) == fingerprint(form_of(other))) is equal
    assert fingerprint(reduced(form_of(r"x \cdot x - 1 + 0"))) == fingerprint(reduced(form_of("x^2 - 1")))
    assert reduced(form_of(r"\int x dx")) == form_of(r"\int x dx"), "integrals are left"


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


@pytest.mark.parametrize(("reference", "answer"), [*HARMLESS, *HARMFUL])
def test_units_that_agree_or_are_left_out_are_harmless(reference: str, answer: str) -> None:
    assert (objection_to_words(reference, answer, "") == "") is ((reference, answer) in HARMLESS)
    assert objection_to_words("5", r"5\text{ floops}", "How many floops are there?") == ""
    assert objection_to_words("5", r"5\text{ million}", "How many million floops are there?")
    endings = {r"5\text{ cm}": r"\text{ cm}", "5 apples": "apples", r"x^2 + 1": "", r"\text{Evelyn}": ""}
    assert {text: dropped(text) for text in endings} == endings


# `and` and `or` separate values for math-verify, and `percent` is its sign: they do not end up in what it drops.
@given(
    st.sampled_from(sorted(NO_UNIT - {"and", "or", "percent"})), st.sampled_from(["cm", "apples", ""]), st.booleans()
)
def test_no_unit_has_a_word_that_changes_the_value(word: str, unit: str, first: bool) -> None:
    words = f"{word} {unit}" if first else f"{unit} {word}"
    assert objection_to_words("5", rf"5\text{{ {words}}}", f"How many {word} {unit} are there?")


@given(st.text(max_size=40), st.text(max_size=20))
def test_any_text_is_survived(answer: str, prompt: str) -> None:
    assert isinstance(objection_to_words("5", answer, prompt), str)
