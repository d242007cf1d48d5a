from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.api import BackendError, NonFiniteError, TrainBatch, TrainRow
from retrain_local.backend import LocalBackend
from retrain_local.model import load as dtypes
from retrain_local.training.loss_formulas import CISPO, GSPO, PPO
from retrain_local.training.packs import pack_rows
from retrain_local.training.step_loss import Mismatch, PolicyLoss
from tests.kit.local_backend import Local
from tests.kit.plain_path import distance, gradient, joined, plain_gradient, plain_model
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

FREE_BYTES = "retrain_local.training.budget.free_bytes"


@pytest.fixture(scope="module")
def batch(local: Local, trained_folder: Path) -> TrainBatch:
    """The rows that `trained` samples."""
    backend = local.make()
    backend.load(trained_folder)
    return local.roll(backend, step=1)


@pytest.mark.parametrize("temperature", first_or_long([0.7, 1.0]))
def test_on_policy_ratio_is_one(trained: LocalBackend, local: Local, temperature: float) -> None:
    batch = local.roll(trained, step=1, temperature=temperature, max_tokens=60)
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


def test_packs_change_the_gradient_of_no_loss(trained: LocalBackend, batch: TrainBatch) -> None:
    noise, trainer = np.random.default_rng(3), trained._trainer
    rows = [replace(row, logprobs_T=row.logprobs_T - noise.normal(0.0, 0.2, len(row.tokens_T))) for row in batch.rows]
    batch = replace(batch, rows=tuple(rows), num_masked=2)
    by_sequence = Mismatch(level="geometric", mode="mask", low=0.95, high=2.0)
    for loss in (
        trainer._loss,
        PolicyLoss(spec=GSPO, clip=GSPO.clip.resolved(0.05, 0.05, 0.0), aggregation="sequence_mean"),
        PolicyLoss(spec=PPO, clip=PPO.clip.resolved(0.0, 0.0, 3.0), aggregation="constant", max_tokens=60),
        PolicyLoss(spec=CISPO, clip=CISPO.clip.resolved(0.0, 1.1, 0.0), mismatch=by_sequence),
    ):
        trainer._loss = loss
        whole = gradient(trained, batch)
        assert whole.norm() > 0.0
        for max_tokens in (1, 60):
            assert distance(gradient(trained, batch, max_tokens), whole) < 1e-5, loss.spec.name


def test_packs_at_a_time_give_the_same_bits_as_one_after_another(trained: LocalBackend, batch: TrainBatch) -> None:
    assert len(pack_rows(batch.rows, device=torch.device("cpu"), max_tokens=60)) > 3
    found = []
    for workers in (1, 2, 3):
        trained._trainer._workers = workers  # type: ignore[union-attr]
        found.append(gradient(trained, batch, 60))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_gradient_in_bf16(local: Local, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one and the same policy: ratios would multiply the gaps of two ways of rounding into both gradients."""
    monkeypatch.setattr(dtypes, "has_instructions", lambda: True)  # however slow bf16 is here
    backend = local.trained(dtype="bf16")
    batch = local.roll(backend, step=1, temperature=0.7)
    logprobs = backend.logprobs(batch.rows, 0.7)
    rows = [replace(row, logprobs_T=found_T) for row, found_T in zip(batch.rows, logprobs, strict=True)]
    backend.save_adapter(tmp_path)
    exact, bf16 = (
        joined(plain_gradient(batch, plain_model(model_folder, tmp_path, dtype), on_policy=True))
        for dtype in (torch.float32, torch.bfloat16)
    )
    found = gradient(backend, replace(batch, rows=tuple(rows)))
    assert distance(found, bf16) < 2e-2
    assert distance(found, exact) < 1.2 * distance(bf16, exact), "no worse than the plain one"


def test_silent_tokens_count_in_the_denominator_and_others_not_at_all(trained: LocalBackend, batch: TrainBatch) -> None:
    """A prompt alone, tokens of an environment or padding behind a row, and twice the rows, half without credit."""
    zeros = {"logprobs_T": np.zeros(90), "advantages_T": np.zeros(90)}
    nothing = TrainRow(tokens_T=np.arange(90), action_T=np.zeros(90, bool), **zeros)
    longer = []
    for extra, row in enumerate(batch.rows, start=1):
        tail = {"tokens_T": np.full(extra, 7), "action_T": np.zeros(extra, bool)}
        tail |= {"logprobs_T": np.zeros(extra), "advantages_T": np.zeros(extra)}
        longer.append(replace(row, **{name: np.concatenate([getattr(row, name), end]) for name, end in tail.items()}))
    silent = [replace(row, advantages_T=np.zeros(len(row.tokens_T))) for row in batch.rows]
    wanted = gradient(trained, batch)
    for rows, share in (((*batch.rows, nothing), 1), (longer, 1), ((*batch.rows, *silent), 2)):
        assert distance(share * gradient(trained, replace(batch, rows=tuple(rows))), wanted) < 1e-5


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_the_gradient_norm_is_reported_before_clipping(local: Local, batch: TrainBatch, clip: float) -> None:
    backend = local.make(clip=clip)
    norm = float(gradient(backend, batch).norm())
    assert backend.train(batch).grad_norm == pytest.approx(norm, rel=1e-5)
    moments = [state["exp_avg"].flatten() for state in backend._trainer.optimizer.state.values()]
    assert float(torch.cat(moments).norm() / (1 - 0.9)) == pytest.approx(clip or norm, rel=1e-3)


def test_one_step_is_adamw(local: Local, batch: TrainBatch) -> None:
    backend = local.make(lr=1e-2, weight_decay=0.5)

    def weights() -> torch.Tensor:
        return joined({name: p.detach() for name, p in backend._trainer.parameters.items()})

    slopes, before = gradient(backend, batch), weights()
    backend.train(batch)
    torch.testing.assert_close(weights(), before * (1 - 1e-2 * 0.5) - 1e-2 * slopes / (slopes.abs() + 1e-8))


def test_the_deterministic_mode(trained: LocalBackend, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = trained._trainer, []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(trainer, "_check_stop", lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    for is_ordered in (True, False):
        trainer._is_ordered = is_ordered
        trained.train(batch)
    half = len(seen) // 2
    assert seen == [False] * half + [True] * half
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG"), "otherwise each matrix product of that mode warns"


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_non_finite_step_changes_nothing(trained: LocalBackend, batch: TrainBatch, bad: str) -> None:
    trainer, norm = trained._trainer, trained._pair.trained._norm  # type: ignore[union-attr]

    def snapshot() -> list[torch.Tensor]:
        moments = (t for p in trainer.parameters.values() for t in trainer.optimizer.state[p].values())
        return [t.detach().clone() for t in (*trainer.parameters.values(), *moments)]

    before, kept = snapshot(), norm.detach().clone()
    *_, (name, last) = trainer.parameters.items()
    if bad == "loss":
        norm.data[0] = float("nan")
    else:
        handle = last.register_hook(lambda g: g * float("inf"))
    with pytest.raises(NonFiniteError) as caught:
        trained.train(batch)
    assert codes_in(caught) == [f"run.non-finite-{bad}"]
    assert bad == "loss" or name in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(), before, strict=True))
    assert trained.publish() == 1
    if bad == "loss":
        norm.data.copy_(kept)
    else:
        handle.remove()
    assert np.isfinite(trained.train(batch).loss)


def test_impossible_batches_are_refused(trained: LocalBackend, batch: TrainBatch) -> None:
    for refused, code in ((replace(batch, rows=()), "no-actions"), (replace(batch, loss="x"), "unknown-loss")):
        with pytest.raises(BackendError) as caught:
            trained.train(refused)
        assert codes_in(caught) == [f"backend.{code}"]


def test_free_memory_decides_on_recomputation(local: Local, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for free in (2**40, 2**23):
        monkeypatch.setattr(FREE_BYTES, lambda device, free=free: free)
        trainer = (backend := local.make())._trainer
        found.append((gradient(backend, batch), trainer._limits, trainer._decoder.recompute))
        monkeypatch.setattr(FREE_BYTES, lambda device: 0)
        trainer._packs(batch.rows)
        assert trainer._decoder.recompute is found[-1][2], "decided once"
    (plain, much, kept), (again, little, recomputed) = found
    assert (kept, recomputed) == (False, True)
    assert little.recompute
    assert not much.recompute
    assert distance(again, plain) < 1e-5
    much.kept_tokens = 5
    trainer = local.make()._trainer
    trainer._limits = much
    trainer._packs(batch.rows)
    assert trainer._decoder.recompute, "rows longer than what was found to fit"
