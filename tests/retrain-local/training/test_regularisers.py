from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain.api import TrainBatch
from retrain.kernel.config.plugin_tables import EntropyTable, KlTable
from retrain_local.backend import LocalBackend
from retrain_local.training.loss_formulas import IMPORTANCE_SAMPLING, PPO
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
from retrain_local.training.step_loss import PolicyLoss
from tests.kit.local_backend import Local
from tests.kit.plain_path import distance, gradient
from tests.kit.scored_tokens import Scored, scored

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
    torch.testing.assert_close(found, torch.tensor([0.1 * 0.02 - 1.5 + 2.0 * 0.2, -2.0]))
    assert added_terms(Regularisers(), Columns(), new_M, old_M, torch.ones(2), None) is None


def test_the_distance_to_the_old_policy_has_no_gradient_from_rounding() -> None:
    new_M = torch.tensor([SAME_POLICY / 2, -SAME_POLICY / 2, 0.3, -0.3], requires_grad=True)
    distances(new_M, torch.zeros(4)).sum().backward()
    assert new_M.grad.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_covariances_are_taken_for_either_of_their_terms() -> None:
    kinds = ({}, {"entropy": 0.1, "kl_cov_coef": 2.0}, {"kl_cov": 0.1}, {"clip_cov": 0.1})
    assert [Regularisers(**each).has_marks for each in kinds] == [False, False, True, True]


def test_documented_covariances() -> None:
    found_N = covariances(LOGPROBS, ADVANTAGES)
    assert found_N == pytest.approx([0.963, -0.747, -0.517, -1.232, -0.732], abs=1e-9)
    assert highest(found_N, 2e-3).tolist() == [True, False, False, False, False]
    assert not drawn_between(found_N, np.ones(5, np.bool_), 2e-3, 1.0, 5.0, np.random.default_rng(0)).any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=60), st.floats(0, 1), st.integers(0, 2**32 - 1))
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


OLD, NEW = [-1, -0.5, -2, -0.1, -0.7, -0.3], [-0.6, -0.9, -1, -0.1, -0.8, -0.35]
OF_REFERENCE, SEQUENCES, CREDIT = [-0.8, -0.9, -1.5, -0.3, -0.6, -0.2], [0, 0, 1, 1, 1, 2], [1.0, -1.0, 0.5]
# TRL 1.16's GRPOTrainer._compute_loss in float64: beta 0.1, epsilon 0.2, max_completion_length 4
TRL = {
    "token_mean": (0.385645, [0.004973, -0.11172, 0.475699, 0.17, 0.14779, -0.081647]),
    "sequence_mean": (0.047903, [0.004973, -0.11172, 0.317133, 0.113333, 0.098527, -0.163294]),
    "constant": (0.192823, [0.002486, -0.05586, 0.23785, 0.085, 0.073895, -0.040824]),
}


def made(local: Local, estimator: Any = "", lr: float = 1e-2, **entropy: float) -> LocalBackend:
    """A backend with these keys of `[entropy]`, and the estimator of `[kl]`."""
    tables = {"kl": KlTable(estimator=estimator), "entropy": EntropyTable(**entropy)}  # type: ignore[arg-type]
    return local.make(lr=lr, tables=tables)  # type: ignore[no-any-return]


def tokens() -> Scored:
    """The tokens of the documented sequences."""
    return scored(np.array(OLD), np.array(CREDIT)[SEQUENCES], SEQUENCES)


@pytest.mark.parametrize("aggregation", sorted(TRL))
def test_the_kl_in_the_loss_is_trls(aggregation: str) -> None:
    settings = PolicyLoss(spec=PPO, clip=PPO.clip.resolved(0.0, 0.0, 0.0), aggregation=aggregation, max_tokens=4)
    denominator = {"token_mean": 6, "sequence_mean": 3, "constant": 12}[aggregation]
    new_M = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    columns = Columns(
        reference_M=torch.tensor(OF_REFERENCE, dtype=torch.float64),
        kl_coefs_M=torch.full((6,), 0.1, dtype=torch.float64),
    )
    value, _ = settings.of_pack(new_M, tokens(), denominator, columns=columns)
    (gradient_M,) = torch.autograd.grad(value, new_M)
    wanted, gradient = TRL[aggregation]
    assert value.item() == pytest.approx(wanted, abs=1e-6)
    assert gradient_M.tolist() == pytest.approx(gradient, abs=1e-6)


def test_dropped_tokens_have_no_gradient_and_still_count() -> None:
    new_M = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    dropped_M = torch.tensor([True, False, False, True, False, False])
    loss = PolicyLoss(spec=IMPORTANCE_SAMPLING)
    gradients = []
    for columns in (Columns(), Columns(dropped_M=dropped_M)):
        value, _ = loss.of_pack(new_M, tokens(), 6, columns=columns)
        gradients.append(torch.autograd.grad(value, new_M)[0])
    assert torch.equal(gradients[1], gradients[0] * ~dropped_M)


def with_reference(backend: LocalBackend, batch: TrainBatch, coef: float, *, credit: float = 1.0) -> TrainBatch:
    found = backend.reference_logprobs(batch.rows, batch.temperature)
    rows = (
        replace(row, reference_logprobs_T=reference_T, kl_coef=coef, advantages_T=credit * row.advantages_T)
        for row, reference_T in zip(batch.rows, found, strict=True)
    )
    return replace(batch, rows=tuple(rows))


@pytest.mark.long
@pytest.mark.parametrize(
    "entropy",
    [{"coef": 0.1}, {"kl_cov": 0.1, "kl_cov_coef": 3.0}, {"clip_cov": 0.1, "clip_cov_low": 0.01, "clip_cov_high": 9.0}],
)
def test_neither_packs_nor_chunks_change_the_gradient(local: Local, entropy: dict[str, float]) -> None:
    backend, plain = made(local, **entropy), made(local)
    for each in (backend, plain):
        each.train(local.roll(each))
        each.publish()
    batch = with_reference(backend, local.roll(backend, step=1), 0.3)
    if "coef" not in entropy:  # a later update of the step: the policy has moved since it sampled
        batch = replace(batch, update=1, updates=2)
        backend.train(replace(batch, update=0))
    whole = gradient(backend, batch)
    for max_tokens in (1, 60):
        cut = gradient(backend, batch, max_tokens)
        assert distance(cut, whole) < 1e-5
    trainer = backend._trainer
    object.__setattr__(trainer._loss, "regularisers", Regularisers())
    assert distance(gradient(backend, batch), whole) > 1e-3, "and the term does something"


def divergence_of(backend: LocalBackend, batch: TrainBatch) -> float:
    """Mean k3 of the trained policy's own log-probabilities."""
    pairs = zip(backend.logprobs(batch.rows, 1.0), backend.reference_logprobs(batch.rows, 1.0), batch.rows, strict=True)
    d_N = np.concatenate([(b - a)[row.action_T] for a, b, row in pairs])
    return float((np.expm1(d_N) - d_N).mean())


def test_a_kl_in_the_loss_leads_back_to_the_reference(local: Local) -> None:
    backend = made(local, lr=3e-3)
    for step in range(2):
        backend.train(replace(local.roll(backend, step=step), lr=3e-2))
        backend.publish()
    away = divergence_of(backend, local.roll(backend, step=2))
    for step in range(8):
        backend.train(with_reference(backend, local.roll(backend, step=step), 1.0, credit=0.0))
        backend.publish()
    assert divergence_of(backend, local.roll(backend, step=2)) < 0.7 * away


def test_an_entropy_bonus_raises_the_entropy(local: Local) -> None:
    backend = made(local, coef=1.0)
    batch = local.roll(backend)
    idle = replace(batch, rows=tuple(replace(row, advantages_T=0.0 * row.advantages_T) for row in batch.rows))

    def surprise() -> float:
        again = local.roll(backend, step=0)
        return -float(np.concatenate([row.logprobs_T[row.action_T] for row in again.rows]).mean())

    before, losses = surprise(), []
    for _ in range(3):
        losses.append(backend.train(idle).loss)
        backend.publish()
    assert losses[0] == pytest.approx(-before, rel=0.1)  # minus the mean entropy
    assert losses[2] < losses[1] < losses[0]
    assert surprise() > before
