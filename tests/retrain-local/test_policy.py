"""What the local backend shares with an engine: log-probabilities, adapter, version, and what it promises with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import BackendError, Determinism, EngineTraits, LogprobRow, SampleRequest, SamplingParams, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.memory.sizes import TOKEN_BUDGET
from retrain_local.plugin import CAPABILITIES
from tests.kit.shared import first_or_long

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]


@pytest.mark.parametrize("temperature", first_or_long([0.7, 1.0]))
def test_log_probabilities_are_those_that_sampling_gave(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, temperature: float
) -> None:
    backend = make_backend()
    for step in range(3):
        batch = roll(backend, requests, step=step, temperature=temperature)
        rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch.rows]
        for found_T, row in zip(backend.logprobs(rows, temperature), batch.rows, strict=True):
            np.testing.assert_allclose(found_T, row.logprobs_T, atol=1e-5)
            assert not found_T[~row.action_T].any()
        backend.train(batch)
        backend.publish()


def test_asking_leaves_the_training_as_it_was(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    plain, asked = make_backend(), make_backend()
    for step in range(2):
        batch = roll(plain, requests, step=step)
        asked.logprobs([LogprobRow(row.tokens_T, row.action_T) for row in batch.rows], 0.5)
        assert plain.train(batch) == asked.train(batch)
        plain.publish()
        asked.publish()
    trained = [list(b._trainer.parameters.values()) for b in (plain, asked) if b._trainer]
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_the_order_and_the_cut_do_not_matter(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    batch = roll(backend, requests)
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch.rows]
    whole = backend.logprobs(rows, 1.0)
    monkeypatch.setitem(TOKEN_BUDGET, "cpu", 40)
    for one, other in zip(whole, reversed(backend.logprobs(rows[::-1], 1.0)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_rows_without_actions_and_no_rows(make_backend: MakeBackend) -> None:
    backend = make_backend()
    assert backend.logprobs([], 1.0) == []
    (zeros_T,) = backend.logprobs([LogprobRow(np.arange(5), np.zeros(5, dtype=bool))], 1.0)
    assert zeros_T.tolist() == [0.0] * 5
    with pytest.raises(BackendError, match="outside the model's"):
        backend.logprobs([LogprobRow(np.array([1, 10**6]), np.array([False, True]))], 1.0)


def test_out_of_memory_is_answered_by_smaller_pieces(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in roll(backend, requests).rows]
    expected = backend.logprobs(rows, 1.0)
    trainer = backend._trainer
    assert trainer is not None
    once, whole = [], trainer._logprobs

    def short_of_memory(part: Any, temperature: float) -> torch.Tensor:
        if not once:
            once.append(part)
            raise torch.OutOfMemoryError("out of memory")
        return whole(part, temperature)

    monkeypatch.setattr(trainer, "_logprobs", short_of_memory)
    for one, other in zip(expected, backend.logprobs(rows, 1.0), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_row_with_an_engines_own_numbers_is_checked(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make_backend()
    batch = roll(backend, requests)
    first, *others = batch.rows
    for engine_T in (np.full(len(first.tokens_T), np.nan), np.zeros(3)):
        broken = replace(batch, rows=(replace(first, engine_logprobs_T=engine_T), *others))
        with pytest.raises(BackendError, match=r"row 0.*engine's log-probabilit"):
            backend.train(broken)


class Remote:
    """An engine elsewhere that says what it was told."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.published: list[tuple[int, bytes]] = []

    def publish(self) -> None:
        folder = Path(self.policy.model_path).parent / f"version-{self.policy.version}-{len(self.published)}"
        folder.mkdir()
        self.policy.save_adapter(folder)
        self.published.append((self.policy.version, (folder / "adapter_model.safetensors").read_bytes()))

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Any]:
        return []

    def metrics(self) -> Mapping[str, float]:
        return {"engine_field": 1.0}

    def close(self) -> None:
        """Nothing is held."""


def test_an_engine_elsewhere_is_brought_to_each_version(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    local = make_backend()
    batch = roll(local, requests)
    engine = Remote(local._policies[0])
    local._engine = engine
    assert local.publish() == 0
    local.train(batch)
    assert local.publish() == 1
    assert [version for version, _ in engine.published] == [0, 1]
    assert engine.published[0][1] != engine.published[1][1]
    assert local.metrics() == {"engine_field": 1.0}


def test_a_backend_promises_no_more_than_its_engine(make_backend: MakeBackend) -> None:
    assert make_backend().capabilities == CAPABILITIES
    less = EngineTraits().limit(CAPABILITIES)
    assert less.determinism is Determinism.NONE
    assert not less.provides_entropy
    assert less.supports_checkpoint_resume
    same = EngineTraits(determinism=Determinism.EXACT, provides_entropy=True).limit(CAPABILITIES)
    assert same == CAPABILITIES
