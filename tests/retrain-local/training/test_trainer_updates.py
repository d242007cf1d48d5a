"""One update of several: its learning rate, the packs it counts, and what its ratio and gap refer to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from retrain.api import Sample, SamplingParams
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.training.step_loss import Mismatch
from tests.kit.local_backend import Local


def weights(backend: LocalBackend) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in backend._trainer.parameters.values()])  # type: ignore[union-attr]


def test_the_rate_of_the_batch_replaces_the_configured_one(local: Local) -> None:
    plain, scheduled = local.make(lr=1e-2), local.make(lr=0.5)
    batch = local.roll(plain)
    assert plain.train(batch).lr == 1e-2
    assert scheduled.train(replace(batch, lr=1e-2)).lr == 1e-2
    assert torch.equal(weights(plain), weights(scheduled))
    assert plain.train(batch).lr == 1e-2
    assert scheduled.train(batch).lr == 0.5  # a rate is that of its own update
    assert not torch.equal(weights(plain), weights(scheduled))


def test_the_packs_of_all_updates_are_counted(local: Local) -> None:
    context = local.context(options={"micro_batch_tokens": 64})
    progress, backend = context.training_progress, create_backend(context)
    batch = replace(local.roll(backend), updates=3)
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


def test_with_an_importance_weight_the_ratio_refers_to_the_trainer_and_the_gap_to_the_sampler(local: Local) -> None:
    backend = local.make()
    trainer = backend._trainer
    trainer._loss = replace(trainer._loss, mismatch=Mismatch(high=1.5))
    batch = local.roll(backend)
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


def test_sampling_reports_tokens_per_segment_and_training_its_packs(local: Local) -> None:
    context = local.context(options={"micro_batch_tokens": 64})
    sampling, training = context.sampling_progress, context.training_progress
    backend = create_backend(context)
    drawn: list[int] = []

    def deliver(group: int, index: int, sample: Sample) -> None:
        drawn.append(sampling.drawn)

    samples = backend.sample(local.requests, SamplingParams(max_tokens=40, temperature=1.0, entropy=True), deliver)
    total = sum(len(sample.tokens_T) for group in samples for sample in group)
    assert sampling.drawn == total == drawn[-1]
    assert 0 < drawn[0] < total, "the first ones are delivered before the last"
    assert drawn == sorted(drawn)
    batch = local.roll(backend)
    backend.train(batch)
    assert training.unit == "packs"
    assert training.done == training.total > 1
    assert training.tokens <= sum(len(row.tokens_T) for row in batch.rows), "the prompt of a group is stored once"
    backend.close()
