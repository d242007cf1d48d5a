"""The conformance checks for losses, and tests of the gate."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import pytest
import torch
from retrain.api import LossClip, LossContext
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import soft_gate


@pytest.mark.parametrize("check", conformance("loss", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def gradient(log_ratio: float, advantage: float) -> float:
    """Of the term of one token by its log-probability."""
    new_M = torch.tensor([log_ratio], requires_grad=True)
    context = LossContext(
        new_M=new_M,
        old_M=torch.zeros(1),
        ratios_M=new_M.exp(),
        advantages_M=torch.tensor([advantage]),
        sequences_M=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        clip=LossClip(),
    )
    (found,) = torch.autograd.grad(soft_gate(context).terms_M.sum(), new_M)
    return float(found)


@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_on_policy_the_gradient_is_that_of_reinforce(advantage: float) -> None:
    assert gradient(0.0, advantage) == pytest.approx(advantage)


def test_far_off_policy_the_gate_is_closed_smoothly() -> None:
    slopes = [gradient(log_ratio, 1.0) for log_ratio in (1.0, 1.5, 2.0, 2.5)]
    assert slopes == sorted(slopes, reverse=True)
    assert 0.0 < slopes[-1] < 0.01
