"""The conformance checks for transforms, and a test of the floor."""

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
from {{ cookiecutter.path }} import entropy_floor


@pytest.mark.parametrize("check", conformance("transform", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
def test_no_token_stays_below_the_floor_and_none_above_it_moves(floor: float) -> None:
    uncertainty_T = np.array([0.0, 0.1, 2.0, 5.9])
    lifted_T = entropy_floor(uncertainty_T, floor)
    assert lifted_T.min() >= floor * uncertainty_T.mean()
    above_T = uncertainty_T >= floor * uncertainty_T.mean()
    assert np.array_equal(lifted_T[above_T], uncertainty_T[above_T])
