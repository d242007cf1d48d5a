"""What `[kl]` and `[entropy]` do to an optimizer step of the local backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import PluginContext, SampleRequest, TrainBatch
from retrain.kernel.config.plugin_tables import EntropyTable, KlTable
from retrain.kernel.config.resolved import Config
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.training.loss_formulas import IMPORTANCE_SAMPLING, PPO
from retrain_local.training.regularisers import Columns, Regularisers
from retrain_local.training.step_loss import PolicyLoss

MakeContext = Callable[..., PluginContext]
Roll = Callable[..., TrainBatch]
Make = Callable[..., LocalBackend]
OLD, NEW = [[-1, -0.5], [-2, -0.1, -0.7], [-0.3]], [[-0.6, -0.9], [-1, -0.1, -0.8], [-0.35]]
REFERENCE, CREDIT = [[-0.8, -0.9], [-1.5, -0.3, -0.6], [-0.2]], [1.0, -1.0, 0.5]
# TRL 1.16's GRPOTrainer._compute_loss in float64: beta 0.1, epsilon 0.2, max_completion_length 4
TRL = {
    "token_mean": (0.385645, [0.004973, -0.11172, 0.475699, 0.17, 0.14779, -0.081647]),
    "sequence_mean": (0.047903, [0.004973, -0.11172, 0.317133, 0.113333, 0.098527, -0.163294]),
    "constant": (0.192823, [0.002486, -0.05586, 0.23785, 0.085, 0.073895, -0.040824]),
}


@pytest.fixture
def make(make_context: MakeContext) -> Make:
    """A backend with these keys of `[entropy]`, and the estimator of `[kl]`."""

    def build(estimator: Any = "", lr: float = 1e-2, **entropy: float) -> LocalBackend:
        context = make_context(lr=lr)
        tables = {"kl": KlTable(estimator=estimator), "entropy": EntropyTable(**entropy)}  # type: ignore[arg-type]
        return create_backend(replace(context, config=Config(tables={**context.config.tables, **tables})))

    return build


def flat(lists: Sequence[Sequence[float]]) -> list[float]:
    return [value for values in lists for value in values]


def scored() -> Any:
    """The tokens of the documented sequences, as `of_pack` takes them."""
    old_M = torch.tensor(flat(OLD), dtype=torch.float64)
    counts = torch.tensor([len(values) for values in OLD])
    numbers = torch.repeat_interleave(torch.arange(3), counts)
    return SimpleNamespace(
        rows=(0, 1, 2),
        behaviour_logprobs_M=old_M,
        engine_logprobs_M=old_M,
        advantages_M=torch.tensor(CREDIT, dtype=torch.float64)[numbers],
        sequences_M=numbers,
    )


@pytest.mark.parametrize("aggregation", sorted(TRL))
def test_the_kl_in_the_loss_is_trls(aggregation: str) -> None:
    settings = PolicyLoss(spec=PPO, clip=PPO.clip.resolved(0.0, 0.0, 0.0), aggregation=aggregation, max_tokens=4)
    denominator = {"token_mean": 6, "sequence_mean": 3, "constant": 12}[aggregation]
    new_M = torch.tensor(flat(NEW), dtype=torch.float64, requires_grad=True)
    columns = Columns(
        reference_M=torch.tensor(flat(REFERENCE), dtype=torch.float64),
        kl_coefs_M=torch.full((6,), 0.1, dtype=torch.float64),
    )
    value, _ = settings.of_pack(new_M, scored(), denominator, columns=columns)
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
        value, _ = loss.of_pack(new_M, scored(), 6, columns=columns)
        gradients.append(torch.autograd.grad(value, new_M)[0])
    assert torch.equal(gradients[1], gradients[0] * ~dropped_M)


def with_reference(backend: LocalBackend, batch: TrainBatch, coef: float, *, credit: float = 1.0) -> TrainBatch:
    found = backend.reference_logprobs(batch.rows, batch.temperature)
    rows = (
        replace(row, reference_logprobs_T=reference_T, kl_coef=coef, advantages_T=credit * row.advantages_T)
        for row, reference_T in zip(batch.rows, found, strict=True)
    )
    return replace(batch, rows=tuple(rows))


def gradient(backend: LocalBackend, batch: TrainBatch, max_tokens: int = 0) -> torch.Tensor:
    trainer = backend._trainer
    assert trainer is not None
    trainer._limits.train_tokens = max_tokens
    trainer.accumulate(batch)
    found = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]).clone()
    trainer.optimizer.zero_grad()
    trainer._limits.train_tokens = 0
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "entropy",
    [{"coef": 0.1}, {"kl_cov": 0.1, "kl_cov_coef": 3.0}, {"clip_cov": 0.1, "clip_cov_low": 0.01, "clip_cov_high": 9.0}],
)
def test_neither_packs_nor_chunks_change_the_gradient(
    make: Make, requests: Sequence[SampleRequest], roll: Roll, entropy: dict[str, float]
) -> None:
    backend, plain = make(**entropy), make()
    for each in (backend, plain):
        each.train(roll(each, requests))
        each.publish()
    batch = with_reference(backend, roll(backend, requests, step=1), 0.3)
    if "coef" not in entropy:  # a later update of the step: the policy has moved since it sampled
        batch = replace(batch, update=1, updates=2)
        backend.train(replace(batch, update=0))
    whole = gradient(backend, batch)
    for max_tokens in (1, 60):
        cut = gradient(backend, batch, max_tokens)
        assert float((cut - whole).norm() / whole.norm()) < 1e-5
    trainer = backend._trainer
    assert trainer is not None
    object.__setattr__(trainer._loss, "regularisers", Regularisers())
    assert float((gradient(backend, batch) - whole).norm() / whole.norm()) > 1e-3, "and the term does something"


def divergence(backend: LocalBackend, batch: TrainBatch) -> float:
    """Mean k3 of the trained policy's own log-probabilities."""
    pairs = zip(backend.logprobs(batch.rows, 1.0), backend.reference_logprobs(batch.rows, 1.0), batch.rows, strict=True)
    d_N = np.concatenate([(b - a)[row.action_T] for a, b, row in pairs])
    return float((np.expm1(d_N) - d_N).mean())


def test_a_kl_in_the_loss_leads_back_to_the_reference(
    make: Make, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make(lr=3e-3)
    for step in range(2):
        backend.train(roll(backend, requests, step=step))
        backend.publish()
    away = divergence(backend, roll(backend, requests, step=2))
    for step in range(4):
        backend.train(with_reference(backend, roll(backend, requests, step=step), 1.0, credit=0.0))
        backend.publish()
    assert divergence(backend, roll(backend, requests, step=2)) < 0.7 * away


def test_an_entropy_bonus_raises_the_entropy(make: Make, requests: Sequence[SampleRequest], roll: Roll) -> None:
    backend = make(coef=1.0)
    batch = roll(backend, requests)
    idle = replace(batch, rows=tuple(replace(row, advantages_T=0.0 * row.advantages_T) for row in batch.rows))

    def surprise() -> float:
        again = roll(backend, requests, step=0)
        return -float(np.concatenate([row.logprobs_T[row.action_T] for row in again.rows]).mean())

    before, losses = surprise(), []
    for _ in range(3):
        losses.append(backend.train(idle).loss)
        backend.publish()
    assert losses[0] == pytest.approx(-before, rel=0.1)  # minus the mean entropy
    assert losses[2] < losses[1] < losses[0]
    assert surprise() > before
