"""One update of several: its learning rate, the packs it counts, and what its ratio and gap refer to."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from retrain.api import BackendError, SamplingParams, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.memory.sizes import ACTIVATION_SHARE_GPU, Rows
from retrain_local.training import adamw, budget
from retrain_local.training.adamw import AdamW
from retrain_local.training.budget import activation_bytes
from retrain_local.training.loss_formulas import GSPO, PPO
from retrain_local.training.step_loss import Mismatch, PolicyLoss
from retrain_local.training.trainer import Trainer
from tests.kit.local_backend import Local
from tests.kit.shapes import QWEN3_4B


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
def test_a_short_memory_halves_packs(local: Local, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]) -> None:
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
def test_recomputation_is_planned_on_need(monkeypatch: pytest.MonkeyPatch, free_gib: int, recompute: bool) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda _: free_gib * 2**30 / ACTIVATION_SHARE_GPU)
    plan = budget.plan_packs(SHAPE, torch.bfloat16, torch.device("cuda"), Rows(prompt=256), 1, checkpointing="auto")
    assert plan.recompute is recompute
    assert plan.tokens >= 10_240 + 256, "the longest row of the defaults fits"
    assert activation_bytes(SHAPE, torch.bfloat16, recompute=True) * 10 < activation_bytes(
        SHAPE, torch.bfloat16, recompute=False
    )


@pytest.mark.parametrize(
    ("fitting", "asked", "recompute"), [(6800, "auto", False), (2900, "auto", True), (2900, "off", False)]
)
def test_a_gpu_keeps_what_it_can(monkeypatch: pytest.MonkeyPatch, fitting: int, asked: str, recompute: bool) -> None:
    """6,800 tokens is what a model of 8 B has on a card of 80 GB; a longer row is computed again nevertheless."""
    each = activation_bytes(SHAPE, torch.bfloat16, recompute=False)
    monkeypatch.setattr(budget, "free_bytes", lambda _: (fitting + 1) * each / ACTIVATION_SHARE_GPU)
    given = SHAPE, torch.bfloat16, torch.device("cuda")
    plan = budget.plan_packs(*given, Rows(prompt=256), 1, checkpointing=asked)
    assert plan.recompute is recompute
    assert recompute or abs(plan.tokens - fitting) <= 1
    assert plan.kept_tokens == (plan.tokens if asked == "auto" and not recompute else 0)


@given(rows=st.integers(1, 9), tokens=st.integers(2, 10**6), fitting=st.integers(0, 2 * 10**6))
def test_what_does_not_fit_is_answered_with_a_smaller_number(rows: int, tokens: int, fitting: int) -> None:
    size = budget.PackSize(rows=rows, tokens=tokens, longest=tokens)
    error = budget.too_big_to_train(size, fitting, SHAPE, torch.float32, torch.device("cpu"))
    [told] = re.findall(r"(?:micro_batch_tokens = |below )(\d+)", error.problems[0].fix)
    assert tokens // 2 <= int(told) < tokens
    assert int(told) >= min(tokens - 1, fitting), "what did fit is not given up"
