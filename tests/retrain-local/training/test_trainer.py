from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from retrain.api import BackendError, SampleRequest, TrainBatch, TrainRow
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.backend import LocalBackend
from retrain_local.decoder import Attend
from retrain_local.model import load as dtypes
from retrain_local.options import LocalOptions
from retrain_local.training.loss_formulas import CISPO, GSPO, PPO
from retrain_local.training.packs import pack_rows
from retrain_local.training.step_loss import Mismatch, PolicyLoss
from retrain_local.training.trainer import Trainer

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]


def trainer_of(backend: LocalBackend) -> Trainer:
    assert backend._trainer is not None
    return backend._trainer


def gradient(backend: LocalBackend, batch: TrainBatch, max_tokens: int = 0) -> torch.Tensor:
    trainer = trainer_of(backend)
    trainer._limits.train_tokens = max_tokens
    trainer.optimizer.zero_grad()
    trainer.accumulate(batch)
    flat = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None]).clone()
    trainer.optimizer.zero_grad()
    trainer._limits.train_tokens = 0
    return flat


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_on_policy_ratio_is_one(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, temperature: float
) -> None:
    batch = roll(trained, requests, step=1, temperature=temperature, max_tokens=60)
    assert len({row.action_T.sum() for row in batch.rows}) > 5
    report = trained.train(batch)
    assert report.gap_max < 1e-4
    assert abs(report.ratio_max - 1) < 1e-4
    assert report.ratio_mean == pytest.approx(1, abs=1e-5)
    assert 0 <= report.gap_mean <= report.gap_p99 <= report.gap_max
    assert 0 <= report.k3 < 1e-8
    assert report.ess_frac == pytest.approx(1, abs=1e-6)
    assert report.num_tokens == batch.num_actions
    credit = sum(row.advantages_T.sum() for row in batch.rows) / batch.num_actions
    assert report.loss == pytest.approx(-credit, abs=1e-5)


def test_a_wrong_temperature_would_show(trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll) -> None:
    batch = roll(trained, requests, step=1, temperature=0.7)
    assert trained.train(replace(batch, temperature=1.0)).gap_max > 0.05


@pytest.mark.parametrize("max_tokens", [1, 60, 300, 10_000])
def test_cutting_into_packs_changes_nothing(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, max_tokens: int
) -> None:
    batch = roll(trained, requests, step=1)
    assert distance(gradient(trained, batch, max_tokens), gradient(trained, batch)) < 1e-5


def test_cutting_into_packs_changes_nothing_of_any_loss_off_policy(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    batch, noise, trainer = roll(trained, requests, step=1), np.random.default_rng(3), trainer_of(trained)
    rows = [replace(row, logprobs_T=row.logprobs_T - noise.normal(0.0, 0.2, len(row.tokens_T))) for row in batch.rows]
    batch = replace(batch, rows=tuple(rows), num_masked=2)
    by_sequence = Mismatch(level="geometric", mode="mask", low=0.95, high=2.0)
    for loss in (
        PolicyLoss(spec=GSPO, clip=GSPO.clip.resolved(0.05, 0.05, 0.0), aggregation="sequence_mean"),
        PolicyLoss(spec=PPO, clip=PPO.clip.resolved(0.0, 0.0, 3.0), aggregation="constant", max_tokens=60),
        PolicyLoss(spec=CISPO, clip=CISPO.clip.resolved(0.0, 1.1, 0.0), mismatch=by_sequence),
    ):
        trainer._loss = loss
        whole = gradient(trained, batch)
        assert whole.norm() > 0.0
        for max_tokens in (1, 60, 300):
            assert distance(gradient(trained, batch, max_tokens), whole) < 1e-5, loss.spec.name


def test_two_packs_at_a_time_give_the_same_bits_as_one_after_another(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    batch, trainer = roll(trained, requests, step=1), trainer_of(trained)
    assert len(pack_rows(batch.rows, device=torch.device("cpu"), max_tokens=60)) > 3
    found = []
    for workers in (1, 2, 3):
        trainer._workers = workers
        found.append(gradient(trained, batch, 60))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_gradient_equals_the_plain_definition(
    trained: LocalBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    """Plain: transformers and PEFT, one padded-free row at a time, with its own attention and full logits."""
    batch = roll(trained, requests, step=1, temperature=0.7)
    trained.save_adapter(tmp_path)
    plain = plain_gradients(batch, model_folder, tmp_path, torch.float32)
    trainer = trainer_of(trained)
    trainer.accumulate(batch)
    assert set(plain) == set(trainer.parameters)
    for name, p in trainer.parameters.items():
        assert p.grad is not None
        assert distance(p.grad, plain[name]) < 1e-4, name


def plain_gradients(
    batch: TrainBatch, model_folder: Path, adapter: Path, dtype: torch.dtype, *, on_policy: bool = False
) -> dict[str, torch.Tensor]:
    """Of every trained parameter; with `on_policy` the ratios are 1, whatever log-probabilities the rows have."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    total = torch.zeros(())
    for row in batch.rows:
        logits = model(input_ids=torch.from_numpy(row.tokens_T)[None]).logits[0, :-1].float() / batch.temperature
        logp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(row.tokens_T)[1:, None])[:, 0]
        behaviour = logp.detach() if on_policy else torch.from_numpy(row.logprobs_T)[1:]
        rho = (logp - behaviour).exp()
        total = total - (rho * torch.from_numpy(row.advantages_T * row.action_T)[1:]).sum() / batch.num_actions
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradient_in_bf16_equals_the_plain_definition_in_bf16(
    make_backend: MakeBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one and the same policy: ratios would multiply the gaps of two ways of rounding into both gradients."""
    monkeypatch.setattr(dtypes, "has_instructions", lambda: True)  # however slow bf16 is here
    backend = make_backend(dtype="bf16")
    backend.train(roll(backend, requests))
    backend.publish()
    batch = roll(backend, requests, step=1, temperature=0.7)
    logprobs = backend.logprobs(batch.rows, 0.7)
    rows = [replace(row, logprobs_T=found_T) for row, found_T in zip(batch.rows, logprobs, strict=True)]
    backend.save_adapter(tmp_path)
    plain = {
        dtype: plain_gradients(batch, model_folder, tmp_path, dtype, on_policy=True)
        for dtype in (torch.float32, torch.bfloat16)
    }
    trainer = trainer_of(backend)
    trainer.accumulate(replace(batch, rows=tuple(rows)))
    names = list(trainer.parameters)
    found = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])
    exact, bf16 = (torch.cat([plain[dtype][name].float().flatten() for name in names]) for dtype in plain)
    assert distance(found, bf16) < 2e-2
    assert distance(found, exact) < 1.2 * distance(bf16, exact), "no worse than the plain one"


@pytest.mark.parametrize("share", [True, False])
def test_a_shared_prompt_changes_nothing(
    trained: LocalBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    share: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = roll(trained, requests, step=1)
    before = gradient(trained, batch)
    seen = []

    def spied(spans: Spans, device: torch.device) -> PaddedAttend:
        seen.append(spans)
        return PaddedAttend(spans, device)

    trainer = trainer_of(trained)
    monkeypatch.setattr(trainer, "_attend", spied)
    monkeypatch.setattr(
        "retrain_local.training.trainer.pack_rows", lambda rows, **given: pack_rows(rows, **given, share=share)
    )
    assert distance(gradient(trained, batch), before) < 1e-5
    assert any(prefix >= 0 for spans in seen for prefix in spans.prefixes) == share


def with_prompt_row(batch: TrainBatch) -> TrainBatch:
    nothing = TrainRow(
        tokens_T=np.arange(90), action_T=np.zeros(90, bool), logprobs_T=np.zeros(90), advantages_T=np.zeros(90)
    )
    return replace(batch, rows=(*batch.rows, nothing))


def with_tail(batch: TrainBatch) -> TrainBatch:
    """Every row followed by tokens that nobody sampled, as an environment's last words or as padding would be."""
    rows = []
    for extra, row in enumerate(batch.rows, start=1):
        zeros = np.zeros(extra)
        rows.append(
            TrainRow(
                tokens_T=np.concatenate([row.tokens_T, np.full(extra, 7)]),
                action_T=np.concatenate([row.action_T, zeros > 0]),
                logprobs_T=np.concatenate([row.logprobs_T, zeros]),
                advantages_T=np.concatenate([row.advantages_T, zeros]),
            )
        )
    return replace(batch, rows=tuple(rows))


@pytest.mark.parametrize("change", [with_prompt_row, with_tail])
def test_prompt_and_padding_tokens_count_for_nothing(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, change: Callable[[TrainBatch], TrainBatch]
) -> None:
    batch = roll(trained, requests, step=1)
    assert distance(gradient(trained, change(batch)), gradient(trained, batch)) < 1e-6


def test_zero_credit_tokens_count_in_the_denominator(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    batch = roll(trained, requests, step=1)
    silent = tuple(replace(row, advantages_T=np.zeros(len(row.tokens_T))) for row in batch.rows)
    doubled = replace(batch, rows=batch.rows + silent)
    assert distance(2 * gradient(trained, doubled), gradient(trained, batch)) < 1e-5


@pytest.mark.parametrize("asked", ["on", "off"])
def test_recomputing_activations_changes_nothing(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, trainer = roll(trained, requests, step=1), trainer_of(trained)
    plain = gradient(trained, batch)
    monkeypatch.setattr(trainer, "_options", LocalOptions.model_validate({"gradient_checkpointing": asked}))
    trainer._limits.pack_tokens = 0
    packs: list[Spans] = []
    counted: list[int] = []

    def counting(spans: Spans, device: torch.device) -> Attend:
        packs.append(spans)
        attend = PaddedAttend(spans, device)

        def call(layer: int, *given: Any) -> torch.Tensor:
            counted.append(layer)
            return attend(layer, *given)

        return call

    monkeypatch.setattr(trainer, "_attend", counting)
    assert distance(gradient(trained, batch), plain) < 1e-6
    assert [counted.count(layer) for layer in range(4)] == [len(packs) * (2 if asked == "on" else 1)] * 4


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_gradient_norm_is_reported_as_it_was_before_clipping(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, clip: float
) -> None:
    backend = make_backend(clip=clip)
    batch = roll(backend, requests)
    norm = float(gradient(backend, batch).norm())
    trainer = trainer_of(backend)
    assert backend.train(batch).grad_norm == pytest.approx(norm, rel=1e-5)
    moments = [trainer.optimizer.state[p]["exp_avg"] for p in trainer.parameters.values()]
    used = torch.cat([m.flatten() for m in moments]).norm() / (1 - 0.9)
    assert float(used) == pytest.approx(clip or norm, rel=1e-3)


def test_one_step_is_adamw(make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll) -> None:
    backend = make_backend(lr=1e-2, weight_decay=0.5)
    batch = roll(backend, requests)
    slopes = gradient(backend, batch)
    parameters = trainer_of(backend).parameters.values()
    before = torch.cat([p.detach().flatten() for p in parameters])
    backend.train(batch)
    after = torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(after, before * (1 - 1e-2 * 0.5) - 1e-2 * slopes / (slopes.abs() + 1e-8))


def test_the_deterministic_mode_holds_for_a_step_only_where_something_sums_in_arbitrary_order(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    trainer, seen = trainer_of(backend), []
    batch = roll(backend, requests)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(trainer, "_check_stop", lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    for is_ordered in (True, False):
        trainer._is_ordered = is_ordered
        backend.train(batch)
    half = len(seen) // 2
    assert seen == [False] * half + [True] * half
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG"), "else each matrix product of that mode warns"


def test_training_raises_what_is_rewarded(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make_backend(lr=3e-3)
    batch = roll(backend, requests)
    batch = replace(batch, rows=tuple(replace(r, advantages_T=r.action_T * 1.0) for r in batch.rows))
    ratios = [backend.train(batch).ratio_mean for _ in range(5)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1.5


def snapshot(backend: LocalBackend) -> tuple[list[torch.Tensor], list[Any]]:
    trainer = trainer_of(backend)
    weights = [p.detach().clone() for p in trainer.parameters.values()]
    moments = [t.clone() for p in trainer.parameters.values() for t in trainer.optimizer.state[p].values()]
    return weights, moments


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_non_finite_step_changes_nothing(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, bad: str
) -> None:
    batch = roll(trained, requests, step=1)
    trainer = trained._trainer
    assert trainer is not None
    before = snapshot(trained)
    norm = trained._pair.trained._norm
    kept = norm.detach().clone()
    if bad == "loss":
        norm.data[0] = float("nan")
    else:
        name, p = next(iter(trainer.parameters.items()))
        handle = p.register_hook(lambda g: g * float("inf"))
    with pytest.raises(BackendError, match="the loss is nan" if bad == "loss" else "the gradient of .*lora"):
        trained.train(batch)
    after = snapshot(trained)
    assert all(
        torch.equal(a, b) for left, right in zip(before, after, strict=True) for a, b in zip(left, right, strict=True)
    )
    assert trained.publish() == 1
    if bad == "loss":
        norm.data.copy_(kept)
    else:
        assert name
        handle.remove()
    assert np.isfinite(trained.train(batch).loss)


def test_nothing_to_train_on(trained: LocalBackend) -> None:
    with pytest.raises(BackendError, match="no row of the batch has an action token"):
        trained.train(TrainBatch(step=0, rows=(), temperature=1.0))


def test_free_memory_decides_on_a_cpu_whether_activations_are_kept(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for free in (2**40, 2**26):
        monkeypatch.setattr("retrain_local.training.budget.free_bytes", lambda device, free=free: free)
        backend = make_backend()
        trainer, batch = trainer_of(backend), roll(backend, requests)
        found.append((gradient(backend, batch), trainer._limits, trainer._decoder.recompute))
        monkeypatch.setattr("retrain_local.training.budget.free_bytes", lambda device: 0)
        trainer._packs(batch.rows)
        assert trainer._decoder.recompute is found[-1][2], "decided once"
    (plain, much, kept), (again, little, recomputed) = found
    assert (kept, recomputed) == (False, True)
    assert little.recompute
    assert not much.recompute
    assert distance(again, plain) < 1e-5
    much.kept_tokens = 5
    trainer = trainer_of(make_backend())
    trainer._limits = much
    trainer._packs(batch.rows)
    assert trainer._decoder.recompute, "rows longer than what was found to fit"
