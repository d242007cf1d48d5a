from __future__ import annotations

import pytest

from retrain_rewards.answers.form import fingerprint, form_of, is_finished, is_literal, kind_of, reduced

FINISHED = (
    *(r"\ln 1.5", r"0.5\pi", r"\begin{pmatrix}1 & 2\end{pmatrix}^T"),
    *(
        "5",
        "-5",
        "0.25",
        "1,234",
        "1/2",
        r"\frac{6}{2}",
        r"-\frac{3}{4}",
        r"2\frac{1}{2}",
        r"6.63 \times 10^{-34}",
        "10^6",
    ),
    *(
        r"5\%",
        r"\infty",
        r"2\pi",
        r"\frac{2}{3}\pi",
        r"\pi^2/6",
        "e^2",
        "e^{-1}",
        r"\frac{1}{2e}",
        r"\ln 2",
        r"\log_2 3",
    ),
    *(
        r"\sqrt{12}",
        r"\frac{\sqrt{2}}{2}",
        r"\frac{1}{\sqrt{2}}",
        r"\frac{1+\sqrt{5}}{2}",
        r"\sqrt[3]{2}",
        r"2^{\frac13}",
    ),
    *(r"\arctan 2", r"3+4i", r"\sqrt{6}+\sqrt{2}", r"\sqrt{\sqrt{3}}", r"4\sqrt{3}-2\pi", r"90^\circ", "x", "A", "n!"),
    *(r"x^2-1", "(x-1)(x+1)", r"x+\sqrt{12}", r"\binom{n}{k}", r"e^{-x^2}", r"\frac{x}{y}", r"\frac{x^2}{3^2}"),
    *("(1, 2)", "[1, 2)", r"\{1, 2\}", "1, 2", r"\pm 2", r"(-\infty, 0) \cup (0, \infty)", r"\mathbb{R}\setminus\{0\}"),
    *("x = 5", "x^2 + y^2 = 5^2", "1 < x < 2", r"x \in [1, 2)", "f(x) = x^2", r"\emptyset"),
    *(r"\begin{pmatrix}1 & \frac{1}{2}\\3 & 4\end{pmatrix}", r"\frac{1}{5}\begin{pmatrix}1\\2\end{pmatrix}"),
)
UNFINISHED = (
    *(r"\sqrt{0.25}", r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}^T", r"1.5 \cdot 2"),
    *(
        "348+217",
        "348 217",
        "2(3)",
        r"2 \cdot 3",
        "5^1",
        "2^{10}",
        "5!",
        "-(-5)",
        "|5|",
        r"6 \div 2",
        "6:2",
        r"5 \mod 3",
    ),
    *(
        r"\sqrt{4}",
        r"\sqrt{3+4}",
        r"\sqrt{2}+\sqrt{8}",
        r"\sqrt{2}\sqrt{2}",
        r"(1+\sqrt{2})^2",
        r"\ln e^2",
        r"\log_2 8",
    ),
    *(
        r"e^{\ln 5}",
        r"\sin\frac{\pi}{6}",
        r"\sin\frac{\pi}{3}",
        r"\pi \cdot 3^2",
        r"3 \cdot 4\pi",
        "0.5+0.5",
        r"\infty+1",
    ),
    *(
        r"\binom{5}{2}",
        r"\gcd(4, 6)",
        r"\max(1, 5)",
        r"\lfloor 5.5 \rfloor",
        r"\Gamma(5)",
        r"\phantom{5}",
        "2_3",
        "5^{1}_{3}",
    ),
    *(r"\int_0^1 x^2 dx", r"\sum_{k=1}^{n} k", r"\prod_{k=1}^{n} k", r"\lim_{x \to 0} x", r"\frac{d}{dx} x^2"),
    *(r"\det\begin{pmatrix}1&0\\0&1\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    *(r"\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}3\\4\end{pmatrix}", r"\begin{pmatrix}1+3\\6\end{pmatrix}"),
    *(
        "3x+2x",
        r"2 \cdot 3x",
        "x-x",
        r"x \cdot x",
        "x^1",
        "x+0",
        r"x \cdot 1",
        r"\frac{x}{1}",
        "x = 2+3",
        "(1, 1+1)",
        r"\{1+1\}",
    ),
    *(
        r"[1-1, 2]",
        "1+1 < x",
        r"[0, 5] \cap [1, 2]",
        r"\frac{4!}{2}",
        r"\frac{1+3}{2}",
        r"\frac{1}{2} \cdot \frac{2}{3}",
    ),
)


@pytest.mark.parametrize("formula", FINISHED)
def test_finished(formula: str) -> None:
    assert is_finished(form_of(formula))


@pytest.mark.parametrize("formula", UNFINISHED)
def test_what_still_has_to_be_computed_is_not_finished(formula: str) -> None:
    assert not is_finished(form_of(formula))


@pytest.mark.parametrize("formula", [r"\neq 1", r"\not 5", r"6 \to 5", "5.", r"\foo", "", "5 &"])
def test_what_is_no_mathematics_has_no_form(formula: str) -> None:
    with pytest.raises(Exception, match=r".*"):
        form_of(formula)


@pytest.mark.parametrize(
    ("formula", "kind"),
    [
        ("5", ""),
        ("1, 2", "list"),
        (r"\{1\}", "{}"),
        ("(1, 2, 3)", "()"),
        ("(1, 2)", "()"),
        ("[1, 2)", "[)"),
        ("(1, 2]", "(]"),
        (r"\left[1, 2\right]", "[]"),
        ("x = 5", "="),
        (r"x \in [1, 2]", "="),
        (r"\{1\} \cup \{2\}", "union"),
        ("x < 1", "<"),
    ],
)
def test_kinds(formula: str, kind: str) -> None:
    assert kind_of(form_of(formula)) == kind


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


def test_trivial_steps_are_reduced_and_integrals_are_left() -> None:
    assert fingerprint(reduced(form_of(r"x \cdot x - 1 + 0"))) == fingerprint(reduced(form_of("x^2 - 1")))
    assert reduced(form_of(r"\int x dx")) == form_of(r"\int x dx")


@pytest.mark.parametrize(
    ("formula", "literal"), [("-5", True), (r"-2\frac{1}{2}", True), (r"2\pi", False), ("2+3", False)]
)
def test_literals(formula: str, literal: bool) -> None:
    assert is_literal(form_of(formula)) is literal
