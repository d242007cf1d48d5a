"""The conformance checks for rewards, and the numbers that this one accepts as equal."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import pytest
from retrain.api import Example, Outcome
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import CloseNumber


@pytest.mark.parametrize("check", conformance("reward", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("reference", "text", "expected"),
    [
        ("0.5", r"so it is \boxed{1/2}", 1.0),
        ("0.3333333", r"\boxed{1/3}", 1.0),
        ("1000", r"\boxed{ 1e3 }", 1.0),
        ("4", r"first \boxed{4}, but in the end \boxed{5}", 0.0),
        ("4", r"\boxed{4} or rather \boxed{}", 0.0),
        ("4", "4", 0.0),
        ("4", r"\boxed{4/0}", 0.0),
    ],
)
def test_the_last_box_counts(reference: str, text: str, expected: float) -> None:
    assert CloseNumber(1e-6).score(Example(id="1", prompt="?", reference=reference), text).value == expected


@pytest.mark.parametrize(("tolerance", "expected"), [(0.0, 0.0), (0.01, 0.0), (0.05, 1.0)])
def test_the_tolerance_decides(tolerance: float, expected: float) -> None:
    assert CloseNumber(tolerance).score(Example(id="1", prompt="?", reference="100"), r"\boxed{104}").value == expected


def test_a_reference_that_is_not_a_number_gives_no_verdict() -> None:
    score = CloseNumber(1e-6).score(Example(id="1", prompt="?", reference="blue"), "4")
    assert score.outcome is Outcome.NO_VERDICT
