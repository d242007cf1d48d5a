from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain_local.training.regularisers import (
    SAME_POLICY,
    Columns,
    Regularisers,
    added_terms,
    covariances,
    distances,
    drawn_between,
    highest,
    kl_terms,
)

DOCUMENTED = {"k1": [-0.2, 0.4, 0.0], "k2": [0.02, 0.08, 0.0], "k3": [0.021403, 0.07032, 0.0]}
LOGPROBS, ADVANTAGES = np.array([-0.1, -2.0, -0.7, -0.05, -3.0]), np.array([1.0, 1.0, -1.0, -1.0, 0.5])
THETA, REFERENCE = torch.tensor([0.3, -0.2, 0.5]), torch.tensor([-0.4, 0.9, 0.1])
SAMPLER = torch.tensor([0.0, 0.4, -0.3])


def exact(estimator: str, theta_V: Tensor, sampler_V: Tensor) -> Tensor:
    """The expectation of an estimator over every token of a vocabulary of three."""
    new_V, old_V = torch.log_softmax(theta_V, 0), torch.log_softmax(sampler_V, 0)
    terms_V = kl_terms(estimator, new_V, torch.log_softmax(REFERENCE.double(), 0), (new_V - old_V).exp())
    return (old_V.exp() * terms_V).sum()


def divergence(theta_V: Tensor) -> Tensor:
    new_V = torch.log_softmax(theta_V, 0)
    return (new_V.exp() * (new_V - torch.log_softmax(REFERENCE.double(), 0))).sum()


@pytest.mark.parametrize("estimator", sorted(DOCUMENTED))
def test_documented_vectors(estimator: str) -> None:
    new_M, reference_M = torch.tensor([[-1.0, -0.5, -2.0], [-0.8, -0.9, -2.0]])
    found = kl_terms(estimator, new_M, reference_M, torch.ones(3))
    torch.testing.assert_close(found, torch.tensor(DOCUMENTED[estimator]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_on_policy", [True, False])
@pytest.mark.parametrize("estimator", sorted(DOCUMENTED))
def test_the_gradient_of_every_estimator_is_that_of_the_reverse_divergence(estimator: str, is_on_policy: bool) -> None:
    theta = THETA.double().requires_grad_()
    sampler = (THETA if is_on_policy else SAMPLER).double()
    (found,) = torch.autograd.grad(exact(estimator, theta, sampler), theta)
    step, differences = 1e-6, []
    for at in range(3):
        shift = torch.nn.functional.one_hot(torch.tensor(at), 3).double() * step
        difference = divergence(theta.detach() + shift) - divergence(theta.detach() - shift)
        differences.append(difference.item() / (2 * step))
    torch.testing.assert_close(found, torch.tensor(differences, dtype=torch.float64), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_weight_without_gradient_would_give_another_gradient_and_is_refused(estimator: str) -> None:
    new_M = torch.tensor([-1.0], requires_grad=True)
    with pytest.raises(ValueError, match=f"{estimator} in the loss needs an importance weight"):
        kl_terms(estimator, new_M, torch.tensor([-2.0]), torch.ones(1))


def test_terms_add_up_with_their_signs() -> None:
    new_M = torch.tensor([-1.0, -0.5], requires_grad=True)
    old_M = torch.tensor([-1.2, -0.5])
    columns = Columns(
        reference_M=torch.tensor([-0.8, -0.9]), kl_coefs_M=torch.tensor([0.1, 0.0]), held_M=torch.tensor([True, False])
    )
    settings = Regularisers(estimator="k2", entropy=0.5, kl_cov_coef=2.0)
    found = added_terms(settings, columns, new_M, old_M, torch.ones(2), torch.tensor([3.0, 4.0]))
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([0.1 * 0.02 - 1.5 + 2.0 * 0.2, -2.0]))
    assert added_terms(Regularisers(), Columns(), new_M, old_M, torch.ones(2), None) is None


def test_the_distance_to_the_old_policy_has_no_gradient_from_rounding() -> None:
    new_M = torch.tensor([SAME_POLICY / 2, -SAME_POLICY / 2, 0.3, -0.3], requires_grad=True)
    distances(new_M, torch.zeros(4)).sum().backward()
    assert new_M.grad is not None
    assert new_M.grad.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_documented_covariances() -> None:
    found_N = covariances(LOGPROBS, ADVANTAGES)
    assert found_N == pytest.approx([0.963, -0.747, -0.517, -1.232, -0.732], abs=1e-9)
    assert highest(found_N, 2e-3).tolist() == [True, False, False, False, False]
    assert not drawn_between(found_N, np.ones(5, np.bool_), 2e-3, 1.0, 5.0, np.random.default_rng(0)).any()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-9, 9), min_size=1, max_size=60),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_as_many_tokens_are_chosen_as_the_share_says(values: list[float], share: float, seed: int) -> None:
    cov_N, rng = np.array(values), np.random.default_rng(seed)
    count = max(1, int(share * len(values)))
    held_N = highest(cov_N, share)
    assert held_N.sum() == count
    assert cov_N[held_N].min() >= max(cov_N[~held_N], default=-9.0)
    free_N = rng.random(len(values)) < 0.7
    inside_N = (cov_N > 1.0) & (cov_N < 5.0) & free_N
    drawn_N = drawn_between(cov_N, free_N, share, 1.0, 5.0, np.random.default_rng(seed))
    assert drawn_N.sum() == min(count, inside_N.sum())
    assert not (drawn_N & ~inside_N).any()
    assert (drawn_N == drawn_between(cov_N, free_N, share, 1.0, 5.0, np.random.default_rng(seed))).all()


def test_without_its_weight_k1_has_no_gradient_and_k3_that_of_the_forward_divergence() -> None:
    theta, constant_V = THETA.double().requires_grad_(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    new_V, reference_V = torch.log_softmax(theta, 0), torch.log_softmax(REFERENCE.double(), 0)
    forward = (reference_V.exp() * (reference_V - new_V)).sum()
    (wanted,) = torch.autograd.grad(forward, theta, retain_graph=True)
    for estimator, expected in (("k1", torch.zeros_like(wanted)), ("k3", wanted)):
        bare_V = kl_terms(estimator, new_V, reference_V, constant_V)
        (found,) = torch.autograd.grad((new_V.detach().exp() * bare_V).sum(), theta, retain_graph=True)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
