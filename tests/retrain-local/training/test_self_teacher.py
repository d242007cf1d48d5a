"""The weights that teach the policy they belong to: no second model, and nothing changes when they have taught."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import Config, LogprobRow, PluginContext, Seeds, TrainBatch, TrainRow, load_plugins
from retrain.kernel.config.load import load_config
from retrain.kernel.types import TeacherRow
from retrain.run.tables import registered_tables
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.options import LocalOptions

ROW = LogprobRow(np.arange(5, 13), np.arange(8) > 3)


def backend_of(**keys: Any) -> LocalBackend:
    plugins = load_plugins({})
    given = [f"--set=distil.{name}={value}" for name, value in keys.items()]
    arguments = ["--model", "builtin:tiny", "--lora-rank", "4", "--lr", "1e-2", "--devices", "cpu", *given]
    config, problems = load_config(None, tables=registered_tables(plugins), arguments=arguments)
    assert isinstance(config, Config)
    assert not problems, problems
    tokenizer = SimpleNamespace(eos_token_id=2)
    context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins, tokenizer=tokenizer, params=LocalOptions())
    return create_backend(context)


def batch(teacher: bool = True) -> TrainBatch:
    zeros_T = np.zeros(8)
    view = TeacherRow(np.arange(3, 13), np.arange(10) > 5, np.full(4, -1.0))
    rows = [
        TrainRow(
            tokens_T=ROW.tokens_T + n,
            action_T=ROW.action_T,
            logprobs_T=zeros_T - 5.0,
            advantages_T=zeros_T,
            teacher=view if teacher and n else None,
        )
        for n in range(2)
    ]
    return TrainBatch(step=0, rows=tuple(rows), temperature=1.0)


def weights(backend: LocalBackend) -> list[torch.Tensor]:
    assert backend._trainer is not None
    return [p.detach().clone() for p in backend._trainer.parameters.values()]


@pytest.mark.parametrize("mode", ["sampled_token", "topk", "full"])
@pytest.mark.parametrize("teacher", ["base", "live", "ema"])
def test_the_teacher_has_its_weights_and_leaves_the_policy_as_it_is(teacher: str, mode: str) -> None:
    backend = backend_of(teacher=teacher, mode=mode)
    (start,) = backend.logprobs([ROW], 1.0)
    for _ in range(2):
        report = backend.train(batch())
        assert np.isfinite(report.loss)
    before = weights(backend)
    (own,), (base,), (given,) = (
        ask([ROW], 1.0) for ask in (backend.logprobs, backend.reference_logprobs, backend.teacher_logprobs)
    )
    assert all(torch.equal(a, b) for a, b in zip(before, weights(backend), strict=True))
    np.testing.assert_array_equal(base, start)
    assert np.abs(own - base).max() > 1e-4
    if teacher == "ema":
        assert 0.0 < np.abs(given - base).max() < np.abs(own - base).max()
    else:
        np.testing.assert_array_equal(given, base if teacher == "base" else own)


def test_the_average_moves_by_its_rate_and_only_it_is_held() -> None:
    backend = backend_of(teacher="ema", ema_rate=0.25)
    trainer = backend._trainer
    assert trainer is not None
    assert trainer.teacher is not None
    wanted = [p.detach().clone() for p in trainer.parameters.values()]
    for _ in range(3):
        backend.train(batch())
        wanted = [0.75 * a + 0.25 * p.detach() for a, p in zip(wanted, trainer.parameters.values(), strict=True)]
    for average, value in zip(trainer.teacher.average.values(), wanted, strict=True):
        torch.testing.assert_close(average, value)
    assert backend_of(teacher="live")._trainer.teacher.average == {}


@pytest.mark.parametrize("mode", ["sampled_token", "full"])
def test_a_step_without_a_teacher_changes_nothing(mode: str) -> None:
    backend = backend_of(teacher="base", mode=mode)
    before = weights(backend)
    assert backend.train(batch(teacher=False)).loss == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(backend), strict=True))


@pytest.mark.parametrize("mode", ["topk", "full"])
def test_packs_do_not_change_the_gradient(mode: str) -> None:
    found = []
    for most in (0, 9):
        backend = backend_of(teacher="base", mode=mode, alpha=0.5)
        trainer = backend._trainer
        assert trainer is not None
        trainer._limits.train_tokens = most
        loss, _, _ = trainer.accumulate(batch())
        found.append((loss, torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
