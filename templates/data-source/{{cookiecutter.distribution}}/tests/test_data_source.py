"""The conformance checks for data sources, and tests of these tasks."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import pytest
from retrain.api import ConfigError
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import Carrying, Options, carries


@pytest.mark.parametrize("check", conformance("data-source", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def test_all_tasks_are_different_carry_and_have_right_references() -> None:
    examples = Carrying(Options(digits=1, size=45), "test").load().examples
    assert len({example.prompt for example in examples}) == 45
    for example in examples:
        left, right = (int(part) for part in example.id.split("-")[-2:])
        assert example.prompt == f"What is {left} + {right}?"
        assert int(example.reference) == left + right >= 10


def test_more_tasks_than_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="45 exist"):
        Carrying(Options(digits=1, size=46), "test").load()


@pytest.mark.parametrize(("left", "right", "expected"), [(11, 22, 0), (47, 38, 1), (99, 1, 2), (0, 0, 0)])
def test_carries_are_counted(left: int, right: int, expected: int) -> None:
    assert carries(left, right) == expected
