"""Training that runs out of memory: a real model that refuses more tokens at once than it is said to have room for."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain.api import BackendError, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.memory.sizes import ACTIVATION_SHARE_GPU
from retrain_local.training import budget
from retrain_local.training.budget import activation_bytes
from retrain_local.training.trainer import Trainer
from tests.kit.local_backend import Local
from tests.kit.shapes import QWEN3_4B

pytestmark = pytest.mark.slow

SHAPE = replace(QWEN3_4B, context=40_960)


class SmallMemory:
    """Lets a decoder take at most `tokens` tokens in a forward pass."""

    def __init__(self, backend: LocalBackend, tokens: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self.tokens, self.error, self.refused = tokens, error, 0
        decoder: Any = trainer_of(backend)._decoder
        self._hidden = decoder.hidden
        decoder.hidden = self.hidden

    def hidden(self, ids_N: Tensor, *given: Any) -> Tensor:
        if len(ids_N) > self.tokens:
            self.refused += 1
            raise self.error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        found: Tensor = self._hidden(ids_N, *given)
        return found


def trainer_of(backend: LocalBackend) -> Trainer:
    assert backend._trainer is not None
    return backend._trainer


def weights(backend: LocalBackend) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer_of(backend).parameters.values()]).clone()


def last_gradient(backend: LocalBackend) -> Tensor:
    """The gradient of the first step, as AdamW's first moment keeps it: (1 - beta1) g."""
    return torch.cat([state["exp_avg"].flatten() for state in trainer_of(backend).optimizer.state.values()])


def tokens_of(backend: LocalBackend, batch: TrainBatch) -> int:
    """Tokens of the one pack that holds all of this small batch."""
    (pack,) = trainer_of(backend)._packs(batch.rows)
    return pack.spans.num_tokens


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["cuda", "cpu"])
def test_training_recomputes_then_halves_its_packs_and_takes_the_same_step(
    local: Local, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]
) -> None:
    plain, short = local.make(), local.make()
    batch = local.roll(plain)
    memory = SmallMemory(short, tokens_of(plain, batch) - 1, error)
    with caplog.at_level(logging.WARNING, logger="retrain"):
        reports = [backend.train(batch) for backend in (plain, short)]
    assert memory.refused == 2
    assert "recomputed in the backward pass from now on" in caplog.text
    assert "Packs hold" in caplog.text
    wanted, found = last_gradient(plain), last_gradient(short)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    assert reports[0].num_tokens == reports[1].num_tokens
    short.train(batch)
    assert memory.refused == 2, "the smaller size is kept"


@pytest.mark.parametrize("asked", ["on", "off"])
def test_recomputation_that_was_decided_by_the_user_stays(local: Local, asked: str) -> None:
    backend = local.make(options={"gradient_checkpointing": asked})
    batch = local.roll(backend)
    memory = SmallMemory(backend, tokens_of(backend, batch) - 1)
    backend.train(batch)
    assert memory.refused == 1
    assert trainer_of(backend)._decoder.recompute is (asked == "on")


def test_following_the_message_leads_to_a_size_that_fits_and_a_failed_step_changes_nothing(local: Local) -> None:
    tokens, limit = 0, 0
    for attempt in range(6):
        backend = local.make(options={"micro_batch_tokens": tokens})
        batch, before = local.roll(backend), weights(backend)
        limit = limit or tokens_of(backend, batch) // 6
        memory = SmallMemory(backend, limit)
        try:
            backend.train(batch)
        except BackendError as error:
            assert memory.refused >= 3 - attempt  # packs that are computed at a time may both be refused
            (problem, *_) = error.problems
            assert problem.where == "training"
            assert "MiB" in str(problem.why)
            tokens = int(problem.fix.split("micro_batch_tokens = ")[1].split()[0])
            assert torch.equal(weights(backend), before)
            assert all(p.grad is None for p in trainer_of(backend).parameters.values())
        else:
            assert attempt > 0
            return
    pytest.fail("following the message did not lead to a size that fits")


def test_one_row_that_does_not_fit_asks_for_shorter_rows_at_once(local: Local) -> None:
    backend = local.make()
    batch = local.roll(backend)
    longest = max(batch.rows, key=lambda row: len(row.tokens_T))
    memory = SmallMemory(backend, len(longest.tokens_T) - 3)
    with pytest.raises(BackendError, match="tokens of one row") as caught:
        backend.train(replace(batch, rows=(longest,)))
    assert memory.refused == 2, "recomputed, but a single row cannot be halved"
    tokens = int(caught.value.problems[0].fix.split("below ")[1].split()[0])
    assert 1 <= tokens < len(longest.tokens_T)


def test_a_resumed_backend_cuts_its_work_as_before(local: Local, tmp_path: Path) -> None:
    backend, resumed = local.make(), local.make()
    batch = local.roll(backend)
    SmallMemory(backend, tokens_of(backend, batch) - 1)
    backend.train(batch)
    backend.save(tmp_path)
    limits = json.loads((tmp_path / "backend_state.json").read_text())["memory_limits"]
    assert limits["train_tokens"] > 0
    assert limits["recompute"] is True
    resumed.load(tmp_path)
    for each in (backend, resumed):
        each.train(batch)
    assert torch.equal(weights(backend), weights(resumed))


@pytest.mark.parametrize(("free_gib", "recompute"), [(6, True), (120, False)])  # a 16 GB card has 6 beside 4 B weights
def test_recomputation_is_planned_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, recompute: bool
) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda _: free_gib * 2**30 / ACTIVATION_SHARE_GPU)
    plan = budget.plan_packs(SHAPE, torch.bfloat16, torch.device("cuda"), checkpointing="auto", at_a_time=1, prompt=256)
    assert plan.recompute is recompute
    assert plan.tokens >= 10_240 + 256, "the longest row of the defaults fits"
    assert activation_bytes(SHAPE, torch.bfloat16, recompute=True) * 10 < activation_bytes(
        SHAPE, torch.bfloat16, recompute=False
    )


@pytest.mark.parametrize(
    ("fitting", "asked", "recompute"), [(6800, "auto", False), (2900, "auto", True), (2900, "off", False)]
)
def test_a_gpu_keeps_activations_where_packs_of_full_speed_fit(
    monkeypatch: pytest.MonkeyPatch, fitting: int, asked: str, recompute: bool
) -> None:
    """6,800 tokens is what a model of 8 B has on a card of 80 GB; a longer row is computed again nevertheless."""
    each = activation_bytes(SHAPE, torch.bfloat16, recompute=False)
    monkeypatch.setattr(budget, "free_bytes", lambda _: (fitting + 1) * each / ACTIVATION_SHARE_GPU)
    given = SHAPE, torch.bfloat16, torch.device("cuda")
    plan = budget.plan_packs(*given, checkpointing=asked, at_a_time=1, prompt=256)
    assert plan.recompute is recompute
    assert recompute or abs(plan.tokens - fitting) <= 1
    assert plan.kept_tokens == (plan.tokens if asked == "auto" and not recompute else 0)
