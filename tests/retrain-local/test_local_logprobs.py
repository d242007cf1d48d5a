"""What the trainer says of rows when it is asked: the numbers of its own loss, and nothing changed by asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from retrain.api import BackendError, SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.model.load import bf16_refusal

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]


@dataclass(frozen=True)
class Bare:
    """A row without log-probabilities and advantages."""

    tokens_T: np.ndarray
    action_T: np.ndarray


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_they_are_those_of_the_sampler_for_what_was_just_sampled(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, temperature: float
) -> None:
    batch = roll(trained, requests, step=1, temperature=temperature)
    for row, logprobs_T in zip(batch.rows, trained.logprobs(batch.rows, temperature), strict=True):
        assert logprobs_T.dtype == np.float64
        assert np.abs(logprobs_T - row.logprobs_T).max() < 1e-4
        assert not logprobs_T[~row.action_T].any()
    other = trained.logprobs(batch.rows, temperature + 0.5)
    assert max(np.abs(b - row.logprobs_T).max() for b, row in zip(other, batch.rows, strict=True)) > 0.1


def test_they_are_of_the_weights_that_are_trained_not_of_those_that_sample(
    trained: LocalBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    batch = roll(trained, requests, step=1)
    before = trained.logprobs(batch.rows, 1.0)
    trained.train(batch)  # not published
    after = trained.logprobs(batch.rows, 1.0)
    assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 1e-3
    assert trained.train(batch).gap_max == pytest.approx(
        max(np.abs(a - row.logprobs_T)[row.action_T].max() for a, row in zip(after, batch.rows, strict=True)), abs=1e-5
    )


def test_asking_changes_nothing(make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll) -> None:
    reports = []
    for asks in (False, True):
        backend = make_backend()
        batch = roll(backend, requests)
        if asks:
            state = torch.random.get_rng_state()
            backend.logprobs(batch.rows, 1.0)
            assert torch.equal(state, torch.random.get_rng_state())
        reports.append(backend.train(batch))
    assert reports[0] == reports[1]


def test_actions_may_be_anywhere_and_a_row_needs_nothing_but_tokens_and_actions(trained: LocalBackend) -> None:
    tokens_T = np.array([5, 9, 2, 77, 13, 8])
    every = trained.logprobs([Bare(tokens_T, np.array([False, True, True, True, True, True]))], 1.0)[0]
    some_T = np.array([False, True, False, False, True, False])
    some = trained.logprobs([Bare(tokens_T, some_T), Bare(tokens_T[:1], some_T[:1])], 1.0)
    assert np.allclose(some[0], np.where(some_T, every, 0.0), atol=1e-5)
    assert some[1].tolist() == [0.0]
    assert trained.logprobs([], 1.0) == []


def test_rows_that_make_no_sense_are_refused(trained: LocalBackend) -> None:
    with pytest.raises(BackendError, match="outside the model's 512"):
        trained.logprobs([Bare(np.array([1, 512]), np.array([False, True]))], 1.0)
    with pytest.raises(BackendError, match="first token is an action"):
        trained.logprobs([Bare(np.array([1, 2]), np.array([True, True]))], 1.0)
    trained.close()
    with pytest.raises(BackendError, match="closed"):
        trained.logprobs([], 1.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_those_of_the_reference_are_the_base_models_bit_for_bit_however_long_one_trains(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, dtype: str
) -> None:
    if dtype == "bf16" and (why := bf16_refusal()):
        pytest.skip(why)
    backend = make_backend(dtype=dtype)
    batch = roll(backend, requests)
    base = backend.logprobs(batch.rows, 0.7)  # B is zero
    for _ in range(2):
        backend.train(batch)
    trained = backend.logprobs(batch.rows, 0.7)
    found = backend.reference_logprobs(batch.rows, 0.7)
    assert all(np.array_equal(a, b) for a, b in zip(found, base, strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(trained, base, strict=True)) > 1e-2
    assert all(np.array_equal(a, b) for a, b in zip(backend.logprobs(batch.rows, 0.7), trained, strict=True))
