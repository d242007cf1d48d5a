"""The conformance checks for uncertainties, and tests of the missing mass."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import numpy as np
import pytest
from retrain.advantages import UncertaintyContext
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import missing_mass


@pytest.mark.parametrize("check", conformance("uncertainty", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def test_it_is_the_probability_of_all_other_tokens() -> None:
    probabilities_T = np.array([1.0, 0.75, 0.5, 1e-9])
    ctx = UncertaintyContext(logprobs_T=np.log(probabilities_T))
    assert missing_mass(ctx) == pytest.approx(1.0 - probabilities_T)


def test_a_nearly_certain_token_keeps_its_uncertainty() -> None:
    assert missing_mass(UncertaintyContext(logprobs_T=np.array([-1e-20]))).tolist() == [1e-20]
