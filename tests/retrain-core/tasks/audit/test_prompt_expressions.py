r"""Which expressions of a prompt a policy could restate in place of an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.tasks.audit.probes import MOST, expressions


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
    assert expressions(prompt, reference) == found


@given(st.text(alphabet="1 2+-*/()$\\[]{}x^=.,frac", max_size=60), st.text(alphabet="12+x ", max_size=4))
def test_any_prompt_gives_few_and_never_the_reference(prompt: str, reference: str) -> None:
    found = expressions(prompt, reference)
    assert len(found) <= MOST
    assert "".join(reference.split()) not in ["".join(text.split()) for text in found]
