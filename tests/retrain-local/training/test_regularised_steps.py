"""What `[kl]` and `[entropy]` do to an optimizer step of the local backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import TrainBatch
from retrain.kernel.config.plugin_tables import EntropyTable, KlTable
from retrain_local.backend import LocalBackend
from retrain_local.training.loss_formulas import IMPORTANCE_SAMPLING, PPO
from retrain_local.training.regularisers import Columns, Regularisers
from retrain_local.training.step_loss import PolicyLoss
from tests.kit.local_backend import Local
from tests.kit.plain_path import distance, gradient
from tests.kit.scored_tokens import Scored, scored

Make = Callable[..., LocalBackend]
OLD, NEW = [[-1, -0.5], [-2, -0.1, -0.7], [-0.3]], [[-0.6, -0.9], [-1, -0.1, -0.8], [-0.35]]
REFERENCE, CREDIT = [[-0.8, -0.9], [-1.5, -0.3, -0.6], [-0.2]], [1.0, -1.0, 0.5]
# TRL 1.16's GRPOTrainer._compute_loss in float64: beta 0.1, epsilon 0.2, max_completion_length 4
TRL = {
    "token_mean": (0.385645, [0.004973, -0.11172, 0.475699, 0.17, 0.14779, -0.081647]),
    "sequence_mean": (0.047903, [0.004973, -0.11172, 0.317133, 0.113333, 0.098527, -0.163294]),
    "constant": (0.192823, [0.002486, -0.05586, 0.23785, 0.085, 0.073895, -0.040824]),
}


def made(local: Local, estimator: Any = "", lr: float = 1e-2, **entropy: float) -> LocalBackend:
    """A backend with these keys of `[entropy]`, and the estimator of `[kl]`."""
    tables = {"kl": KlTable(estimator=estimator), "entropy": EntropyTable(**entropy)}  # type: ignore[arg-type]
    backend: LocalBackend = local.make(lr=lr, tables=tables)
    return backend


def flat(lists: Sequence[Sequence[float]]) -> list[float]:
    return [value for values in lists for value in values]


def tokens() -> Scored:
    """The tokens of the documented sequences."""
    numbers = np.repeat(np.arange(3), [len(values) for values in OLD])
    return scored(np.array(flat(OLD)), np.array(CREDIT)[numbers], numbers)


@pytest.mark.parametrize("aggregation", sorted(TRL))
def test_the_kl_in_the_loss_is_trls(aggregation: str) -> None:
    settings = PolicyLoss(spec=PPO, clip=PPO.clip.resolved(0.0, 0.0, 0.0), aggregation=aggregation, max_tokens=4)
    denominator = {"token_mean": 6, "sequence_mean": 3, "constant": 12}[aggregation]
    new_M = torch.tensor(flat(NEW), dtype=torch.float64, requires_grad=True)
    columns = Columns(
        reference_M=torch.tensor(flat(REFERENCE), dtype=torch.float64),
        kl_coefs_M=torch.full((6,), 0.1, dtype=torch.float64),
    )
    value, _ = settings.of_pack(new_M, tokens(), denominator, columns=columns)
    (gradient_M,) = torch.autograd.grad(value, new_M)
    wanted, gradient = TRL[aggregation]
    assert value.item() == pytest.approx(wanted, abs=1e-6)
    assert gradient_M.tolist() == pytest.approx(gradient, abs=1e-6)


def test_dropped_tokens_have_no_gradient_and_still_count() -> None:
    new_M = torch.tensor(flat(NEW), dtype=torch.float64, requires_grad=True)
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
    assert trainer is not None
    object.__setattr__(trainer._loss, "regularisers", Regularisers())
    assert distance(gradient(backend, batch), whole) > 1e-3, "and the term does something"


def divergence(backend: LocalBackend, batch: TrainBatch) -> float:
    """Mean k3 of the trained policy's own log-probabilities."""
    pairs = zip(backend.logprobs(batch.rows, 1.0), backend.reference_logprobs(batch.rows, 1.0), batch.rows, strict=True)
    d_N = np.concatenate([(b - a)[row.action_T] for a, b, row in pairs])
    return float((np.expm1(d_N) - d_N).mean())


def test_a_kl_in_the_loss_leads_back_to_the_reference(local: Local) -> None:
    backend = made(local, lr=3e-3)
    for step in range(2):
        backend.train(replace(local.roll(backend, step=step), lr=3e-2))
        backend.publish()
    away = divergence(backend, local.roll(backend, step=2))
    for step in range(8):
        backend.train(with_reference(backend, local.roll(backend, step=step), 1.0, credit=0.0))
        backend.publish()
    assert divergence(backend, local.roll(backend, step=2)) < 0.7 * away


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
