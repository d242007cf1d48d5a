"""The gradient that `retrain replay` asks for: to the bit the one that a step takes, and nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrain_local.backend import LocalBackend
from retrain_local.training.loss_formulas import GSPO, PPO
from retrain_local.training.step_loss import PolicyLoss
from tests.kit.local_backend import Local


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
