"""One update of several: its learning rate, the packs it counts, and what its ratio and gap refer to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from retrain.api import SamplingParams
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.training import adamw
from retrain_local.training.adamw import AdamW
from retrain_local.training.loss_formulas import GSPO, PPO
from retrain_local.training.step_loss import Mismatch, PolicyLoss
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
    assert progress.unit == "packs"


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


def test_sampling_reports_its_tokens_and_delivers_what_has_ended(local: Local) -> None:
    context, drawn = local.context(), list[int]()
    backend, sampling = create_backend(context), context.sampling_progress
    params = SamplingParams(max_tokens=40, temperature=1.0, entropy=True)
    samples = backend.sample(local.requests, params, lambda *_: drawn.append(sampling.drawn))
    total = sum(len(sample.tokens_T) for group in samples for sample in group)
    assert sampling.drawn == total == drawn[-1]
    assert 0 < drawn[0] < total, "the first ones are delivered before the last"
    assert drawn == sorted(drawn)


def test_the_gradient_of_all_rows_is_the_one_a_step_takes(trained: LocalBackend, local: Local) -> None:
    batch, trainer = local.roll(trained, step=1), trained._trainer
    assert trainer is not None
    trainer._limits.train_tokens = 60  # several packs
    weights = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    rows = range(len(batch.rows))
    found_N, loss, clipped = trainer.gradient(batch, rows, trainer._loss)
    trainer.accumulate(batch)
    wanted = [p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]
    np.testing.assert_array_equal(found_N, torch.cat(wanted).numpy())
    trainer.optimizer.zero_grad()
    other_N, _, _ = trainer.gradient(batch, rows, PolicyLoss(spec=GSPO, clip=GSPO.clip, aggregation="sequence_mean"))
    assert not np.array_equal(found_N, other_N)
    for name, p in trainer.parameters.items():
        assert torch.equal(p, weights[name])
        assert p.grad is None
    report = trained.train(batch)
    assert (report.loss, report.clip_fraction) == (loss, clipped / batch.num_actions)
    assert report.grad_norm == pytest.approx(np.linalg.norm(found_N), rel=1e-5)


def test_the_shares_of_groups_add_up(trained: LocalBackend, local: Local) -> None:
    batch, trainer = local.roll(trained, step=1), trained._trainer
    assert trainer is not None
    loss = PolicyLoss(spec=PPO, clip=PPO.clip.resolved(0.0, 0.0, 0.0), aggregation="sequence_mean")
    whole_N, value, _ = trainer.gradient(batch, range(len(batch.rows)), loss)
    half = len(batch.rows) // 2
    parts = [trainer.gradient(batch, rows, loss) for rows in (range(half), range(half, len(batch.rows)))]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], whole_N, atol=1e-5 * np.abs(whole_N).max())
    assert sum(part[1] for part in parts) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("at_a_time", "calls"), [(adamw.AT_A_TIME, [2]), (16, [1, 1])])
def test_it_is_torchs_adamw_to_the_last_bit(at_a_time: int, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However few numbers are updated at a time, which bounds what an update of all weights takes on a GPU."""
    counts: list[int] = []
    original = adamw.adamw
    monkeypatch.setattr(
        adamw, "adamw", lambda params, *rest, **named: (counts.append(len(params)), original(params, *rest, **named))
    )
    monkeypatch.setattr(adamw, "AT_A_TIME", at_a_time)
    drawn = torch.Generator().manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in ((3, 4), (5,), (2, 2))]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    ours = AdamW(mine, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for rate in (None, 1e-2, 3e-3, None, 1e-4):
        reference.param_groups[0]["lr"] = rate or 1e-2
        for p, q in list(zip(mine, theirs, strict=True))[:2]:  # the third never has a gradient
            p.grad = torch.randn(p.shape, generator=drawn)
            q.grad = p.grad.clone()
        assert ours.step(rate) == (rate or 1e-2)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
    assert set(ours.state) == set(mine[:2])
    for p, q in zip(mine[:2], theirs[:2], strict=True):
        assert all(torch.equal(ours.state[p][name], value) for name, value in reference.state[q].items())
    assert counts == calls * 5
    ours.zero_grad()
    assert all(p.grad is None for p in mine)
