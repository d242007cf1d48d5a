"""One update of several: its learning rate, the packs it counts, and what its ratio and gap refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from retrain.api import PluginContext, SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.training.step_loss import Mismatch
from retrain_local.training.trainer import Trainer

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]


def trainer_of(backend: LocalBackend) -> Trainer:
    assert backend._trainer is not None
    return backend._trainer


def weights(backend: LocalBackend) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer_of(backend).parameters.values()])


def test_the_rate_of_the_batch_replaces_the_configured_one(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    plain, scheduled = make_backend(lr=1e-2), make_backend(lr=0.5)
    batch = roll(plain, requests)
    assert plain.train(batch).lr == 1e-2
    assert scheduled.train(replace(batch, lr=1e-2)).lr == 1e-2
    assert torch.equal(weights(plain), weights(scheduled))
    assert plain.train(batch).lr == 1e-2
    assert scheduled.train(batch).lr == 0.5  # a rate is that of its own update
    assert not torch.equal(weights(plain), weights(scheduled))


def test_the_packs_of_all_updates_are_counted(
    make_context: Callable[..., PluginContext], requests: Sequence[SampleRequest], roll: Roll
) -> None:
    context = make_context(options={"micro_batch_tokens": 64})
    progress, backend = context.training_progress, create_backend(context)
    batch = replace(roll(backend, requests), updates=3)
    small = replace(batch, rows=batch.rows[:2])
    backend.train(batch)
    packs = progress.done
    assert (packs > 1, progress.total) == (True, 3 * packs)
    backend.train(replace(small, update=1))
    few = progress.done - packs
    assert few < packs
    assert progress.total == packs + 2 * few  # the last one is taken to be like this one
    tokens = progress.tokens
    backend.train(replace(small, update=2))
    assert progress.done == progress.total == packs + 2 * few
    assert progress.tokens > tokens
    backend.train(replace(batch, updates=1))
    assert progress.done == progress.total == packs
    backend.close()


def test_with_an_importance_weight_the_ratio_refers_to_the_trainer_and_the_gap_to_the_sampler(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make_backend()
    trainer = trainer_of(backend)
    trainer._loss = replace(trainer._loss, mismatch=Mismatch(high=1.5))
    batch = roll(backend, requests)
    sampler = [row.logprobs_T - np.log(1.25) * row.action_T for row in batch.rows]
    fixed = tuple(replace(row, engine_logprobs_T=s_T) for row, s_T in zip(batch.rows, sampler, strict=True))
    credits_T = np.concatenate([row.advantages_T[row.action_T] for row in fixed])
    first = backend.train(replace(batch, rows=fixed, updates=2))
    assert first.loss == pytest.approx(-1.25 * credits_T.mean(), rel=1e-4)  # rho = 1, weight = 1.25
    assert first.gap_mean == pytest.approx(np.log(1.25), rel=1e-4)
    now = backend.logprobs(batch.rows, batch.temperature)
    pairs = zip(now, fixed, strict=True)
    ratios_T = np.exp(np.concatenate([now_T[row.action_T] - row.logprobs_T[row.action_T] for now_T, row in pairs]))
    assert np.abs(ratios_T - 1.0).max() > 0.05, "the first update has moved the policy"
    second = backend.train(replace(batch, rows=fixed, update=1, updates=2))
    assert second.loss == pytest.approx(-1.25 * (ratios_T * credits_T).mean(), rel=1e-3)
