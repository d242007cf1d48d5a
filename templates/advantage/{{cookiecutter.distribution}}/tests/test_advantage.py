"""The conformance checks for advantages, and tests of leave-one-out itself."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import numpy as np
import pytest
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import leave_one_out


@pytest.mark.parametrize("check", conformance("advantage", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def test_each_completion_is_compared_with_the_others() -> None:
    assert leave_one_out(np.array([1.0, 0.0, 0.0, 1.0])) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_a_group_of_one_gets_no_credit() -> None:
    assert leave_one_out(np.array([1.0])).tolist() == [0.0]
