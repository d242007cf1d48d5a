"""The conformance checks for algorithms, and a test of this one."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import numpy as np
import pytest
from retrain.advantages import TransformContext
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import centred


@pytest.mark.parametrize("check", conformance("algorithm", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_credit_grows_with_the_rewards_and_not_with_the_length(scale: float) -> None:
    rewards_G = scale * np.array([1.0, 0.0, 0.0, 1.0])
    logprobs_G = [np.full(length, -1.0) for length in (1, 2, 3, 50)]
    ctx = TransformContext(
        advantages_G=rewards_G,
        rewards_G=rewards_G,
        logprobs_G=logprobs_G,
        uncertainties_G=[-logprobs_T for logprobs_T in logprobs_G],
        planning_masks_G=[np.zeros(len(logprobs_T), dtype=np.bool_) for logprobs_T in logprobs_G],
    )
    for advs_T, sign, logprobs_T in zip(centred(ctx).token_advs, (1, -1, -1, 1), logprobs_G, strict=True):
        assert list(advs_T) == [0.5 * scale * sign] * len(logprobs_T)
