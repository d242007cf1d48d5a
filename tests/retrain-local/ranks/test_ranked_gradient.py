"""The gradient of several ranks is that of one process, whatever the loss, however the rows fall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrain.api import Config, TrainBatch, load_plugins
from retrain_local.devices.group import ALONE, Group
from retrain_local.devices.torch_devices import choose_devices
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.training.step_loss import PolicyLoss
from retrain_local.training.trainer import Trainer
from tests.kit.local_backend import Local
from tests.kit.shared import slow_or_long

MakeConfig = Callable[..., Config]
OnThreads = Callable[..., list[Any]]
LOSSES: dict[str, dict[str, Any]] = {
    "importance sampling": {},
    "sequence mean": {"algorithm": {"loss": "gspo"}},
    "constant": {"algorithm": {"loss": "ppo", "aggregation": "constant"}},
    "mismatch": {"algorithm": {"loss": "ppo", "tis_cap": 2.0}},
    "entropy": {"entropy": {"coef": 0.1}},
    "kl": {"kl": {"coef": 0.3, "where": "loss"}},
    "kl_cov": {"entropy": {"kl_cov": 0.1}},
    "clip_cov": {"entropy": {"clip_cov": 0.2, "clip_cov_low": -100.0, "clip_cov_high": 100.0}},
    "all weights": {"model": {"lora_rank": 0}},
}


def trainer_of(config: Config, group: Group = ALONE) -> Trainer:
    plugins = load_plugins()
    source, device = find_source(config.model.model, KEY, plugins), choose_devices(config).trainer
    pair = create_pair(config, source, trainer_device=device, samples=False, seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, p in pair.parameters.items():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return Trainer(pair.trained, pair.parameters, config, loss=PolicyLoss.of(config, plugins), group=group)


def gradient_of(trainer: Trainer, batch: TrainBatch) -> tuple[tuple[Any, ...], Tensor]:
    """Loss, clipped tokens and number of gaps; all gradients in one vector."""
    loss, clipped, gaps_N = trainer.accumulate(batch)
    vector = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])
    return (loss, clipped, len(gaps_N)), vector


@pytest.fixture
def batch(local: Local) -> TrainBatch:
    """Rows with a reference that is not the policy."""
    found = local.roll(local.make())
    rng = np.random.default_rng(5)
    rows = [
        replace(row, reference_logprobs_T=row.logprobs_T + rng.normal(0, 0.1, len(row.tokens_T)), kl_coef=0.3)
        for row in found.rows
    ]
    return replace(found, rows=tuple(rows), num_masked=2)


def check_same(one: tuple[Any, Tensor], other: tuple[Any, Tensor], *, within: float = 1e-6) -> None:
    (loss, *counts), gradient = one
    (other_loss, *other_counts), other_gradient = other
    assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
    assert other_counts == counts
    assert float((other_gradient - gradient).norm() / gradient.norm()) < within


@pytest.mark.parametrize("name", slow_or_long(LOSSES, "sequence mean"))
def test_every_loss_has_the_gradient_of_one_process(
    name: str, batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads
) -> None:
    config = make_config(**LOSSES[name])
    batch = replace(batch, update=int("cov" in name), updates=2)
    alone = gradient_of(trainer_of(config), batch)
    for found in on_threads(2, lambda group: gradient_of(trainer_of(config, group), batch)):
        check_same(alone, found)


@pytest.mark.parametrize("rows", slow_or_long([1, 2, 5], 2))
def test_uneven_batches_and_ranks_without_rows(
    rows: int, batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads
) -> None:
    config, few = make_config(), replace(batch, rows=batch.rows[:rows])
    alone = gradient_of(trainer_of(config), few)
    for found in on_threads(3, lambda group: gradient_of(trainer_of(config, group), few)):
        check_same(alone, found, within=5e-6)  # few rows: their gradients nearly cancel


def test_log_probabilities_come_back_in_the_order_of_the_rows(
    batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads
) -> None:
    alone = trainer_of(make_config()).logprobs(batch.rows, 1.0)
    for found in on_threads(2, lambda group: trainer_of(make_config(), group).logprobs(batch.rows, 1.0)):
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_allclose(other, one, atol=2e-5)


def test_ranks_make_the_very_same_update(batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads) -> None:
    def trained(group: Group) -> list[Tensor]:
        trainer = trainer_of(make_config(optimizer={"grad_clip_norm": 0.01}), group)
        trainer.step(batch)
        return [p.detach().clone() for p in trainer.parameters.values()]

    first, second = on_threads(2, trained)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_an_error_of_one_rank_leaves_all_unchanged(
    batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads
) -> None:
    before = [p.detach().clone() for p in trainer_of(make_config()).parameters.values()]
    trainers: list[Trainer] = []

    def fail(group: Group) -> None:
        trainer = trainer_of(make_config(), group)
        trainers.append(trainer)
        if group.rank:
            trainer._gradients = lambda *_: 1 / 0
        trainer.step(batch)

    with pytest.raises(ZeroDivisionError):
        on_threads(2, fail)
    for trainer in trainers:
        assert all(torch.equal(p, old) for p, old in zip(trainer.parameters.values(), before, strict=True))
        assert all(p.grad is None for p in trainer.parameters.values())
