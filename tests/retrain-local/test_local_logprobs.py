"""Log-probabilities of given rows: the numbers of the trainer's own loss, and nothing is changed by computing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import BackendError
from retrain_local.backend import LocalBackend
from retrain_local.memory.sizes import TOKEN_BUDGET
from retrain_local.model.load import bf16_refusal
from tests.kit.local_backend import Local
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long


@dataclass(frozen=True)
class Bare:
    """A row without log-probabilities and advantages."""

    tokens_T: np.ndarray
    action_T: np.ndarray


def largest_gap(found: Any, wanted: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("temperature", first_or_long([0.7, 1.0]))
def test_of_new_samples_they_are_the_samplers(trained: LocalBackend, local: Local, temperature: float) -> None:
    rows = local.roll(trained, step=1, temperature=temperature).rows
    sampled, found = [row.logprobs_T for row in rows], trained.logprobs(rows, temperature)
    assert largest_gap(found, sampled) < 1e-4
    assert all(f.dtype == np.float64 and not f[~row.action_T].any() for f, row in zip(found, rows, strict=True))
    assert largest_gap(trained.logprobs(rows, temperature + 0.5), sampled) > 0.1


def test_they_are_of_the_weights_that_are_trained_not_of_those_that_sample(trained: LocalBackend, local: Local) -> None:
    batch = local.roll(trained, step=1)
    before = trained.logprobs(batch.rows, 1.0)
    trained.train(batch)  # not published
    after = trained.logprobs(batch.rows, 1.0)
    assert largest_gap(after, before) > 1e-3
    gap = largest_gap(after, [row.logprobs_T for row in batch.rows])
    assert trained.train(batch).gap_max == pytest.approx(gap, abs=1e-5)


def test_computing_them_changes_no_step_and_no_random_state(local: Local) -> None:
    reports = []
    for asks in (False, True):
        backend = local.make()
        batch = local.roll(backend)
        if asks:
            state = torch.random.get_rng_state()
            backend.logprobs(batch.rows, 0.5)
            assert torch.equal(state, torch.random.get_rng_state())
        reports.append([backend.train(batch), backend.train(batch)])
    assert reports[0] == reports[1]


def test_order_cut_and_a_lack_of_memory_do_not_matter(
    trained: LocalBackend, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = local.roll(trained).rows
    whole = trained.logprobs(rows, 1.0)
    trainer: Any = trained._trainer
    failures, plain = [torch.OutOfMemoryError("out of memory")], trainer._logprobs

    def short_of_memory(part: Any, temperature: float) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return plain(part, temperature)

    monkeypatch.setattr(trainer, "_logprobs", short_of_memory)
    assert largest_gap(trained.logprobs(rows, 1.0), whole) < 1e-5
    assert not failures
    monkeypatch.setitem(TOKEN_BUDGET, "cpu", 40)
    trainer._limits.pack_tokens = 0
    assert largest_gap(trained.logprobs(rows[::-1], 1.0)[::-1], whole) < 1e-5


def test_actions_may_be_anywhere_and_a_row_needs_only_tokens_and_actions(trained: LocalBackend) -> None:
    tokens_T = np.array([5, 9, 2, 77, 13, 8])
    every = trained.logprobs([Bare(tokens_T, np.array([False, True, True, True, True, True]))], 1.0)[0]
    some_T = np.array([False, True, False, False, True, False])
    some = trained.logprobs([Bare(tokens_T, some_T), Bare(tokens_T[:1], some_T[:1])], 1.0)
    assert np.allclose(some[0], np.where(some_T, every, 0.0), atol=1e-5)
    assert some[1].tolist() == [0.0]
    assert trained.logprobs([], 1.0) == []


def test_impossible_rows_are_refused(trained: LocalBackend) -> None:
    for tokens, actions, code in (([1, 512], [0, 1], "unknown-token"), ([1, 2], [1, 1], "first-action")):
        with pytest.raises(BackendError) as caught:
            trained.logprobs([Bare(np.array(tokens), np.array(actions, bool))], 1.0)
        assert codes_in(caught) == [f"backend.row-{code}"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_is_the_base_model_bit_for_bit_however_long_one_trains(local: Local, dtype: str) -> None:
    if dtype == "bf16" and (why := bf16_refusal()):
        pytest.skip(why)
    backend = local.make(dtype=dtype)
    batch = local.roll(backend, max_tokens=12)
    base = backend.logprobs(batch.rows, 0.7)  # B is zero
    for _ in range(2):
        backend.train(batch)
    trained = backend.logprobs(batch.rows, 0.7)
    assert largest_gap(backend.reference_logprobs(batch.rows, 0.7), base) == 0.0
    assert largest_gap(trained, base) > 1e-2
    assert largest_gap(backend.logprobs(batch.rows, 0.7), trained) == 0.0
