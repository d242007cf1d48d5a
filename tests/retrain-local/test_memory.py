"""Out of memory, raised by a layer of a real model that refuses more tokens than it is said to have room for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import BackendError, PluginContext, SampleRequest, SamplingParams, TrainBatch
from retrain_local.backend import LocalBackend, create_backend
from retrain_local.memory import Load, is_out_of_memory, too_big_to_train
from retrain_local.options import LocalOptions
from retrain_local.trainer import Trainer

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, entropy=True)


class SmallMemory:
    """Lets the first layer of a model take at most `tokens` tokens in a forward, or hold so many with its cache."""

    def __init__(self, model: Any, tokens: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self.tokens, self.error, self.refused = tokens, error, 0
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
        layer.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, module: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        rows, new = hidden.shape[:2]
        caches = [value for value in kwargs.values() if hasattr(value, "get_seq_length")]
        cached = caches[0].get_seq_length() if caches else 0
        if rows * (new + cached) > self.tokens:
            self.refused += 1
            raise self.error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


def trainer_of(backend: LocalBackend) -> Trainer:
    assert backend._trainer is not None
    return backend._trainer


def weights(backend: LocalBackend) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer_of(backend).parameters.values()]).clone()


def last_gradient(backend: LocalBackend) -> torch.Tensor:
    """The gradient of the first step, as AdamW's first moment keeps it: (1 - beta1) g."""
    trainer = trainer_of(backend)
    return torch.cat([trainer.optimizer.state[p]["exp_avg"].flatten() for p in trainer.parameters.values()])


def tokens_of(batch: TrainBatch) -> int:
    """Tokens of the one micro-batch that holds all of this small batch."""
    return len(batch.rows) * max(len(row.tokens_T) - 1 for row in batch.rows)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["cuda", "cpu"])
def test_training_halves_its_micro_batch_once_and_takes_the_same_step(
    make_backend: MakeBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    caplog: pytest.LogCaptureFixture,
    error: type[RuntimeError],
) -> None:
    plain, short = make_backend(), make_backend()
    batch = roll(plain, requests)
    memory = SmallMemory(trainer_of(short)._model, tokens_of(batch) - 1, error)
    with caplog.at_level(logging.WARNING, logger="retrain"):
        reports = [backend.train(batch) for backend in (plain, short)]
    assert memory.refused == 1
    assert "Out of memory in training" in caplog.text
    wanted, found = last_gradient(plain), last_gradient(short)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    assert reports[0].num_tokens == reports[1].num_tokens
    short.train(batch)
    assert memory.refused == 1, "the smaller size is kept"


def test_training_that_does_not_fit_in_half_either_names_the_key_and_changes_nothing(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make_backend()
    batch = roll(backend, requests)
    memory = SmallMemory(trainer_of(backend)._model, tokens_of(batch) // 4)
    before = weights(backend)
    with pytest.raises(BackendError) as caught:
        backend.train(batch)
    assert memory.refused == 2
    problem = caught.value.problems[0]
    assert problem.where == "training"
    assert "ran out of memory on cpu with" in problem.what
    assert "the biggest tensor: " in problem.what
    assert "MiB" in problem.what
    size = int(problem.fix.split("micro_batch_tokens = ")[1].split()[0])
    assert size < tokens_of(batch) // 2
    assert torch.equal(weights(backend), before)
    assert all(p.grad is None for p in trainer_of(backend).parameters.values())


def test_the_size_that_the_message_names_fits(
    make_context: Callable[..., PluginContext], requests: Sequence[SampleRequest], roll: Roll
) -> None:
    tokens = 0
    for attempt in range(6):
        context = replace(make_context(), params=LocalOptions(micro_batch_tokens=tokens))
        backend = create_backend(context)
        batch = roll(backend, requests)
        SmallMemory(trainer_of(backend)._model, tokens_of(batch) // 6)
        try:
            backend.train(batch)
        except BackendError as error:
            tokens = int(error.problems[0].fix.split("micro_batch_tokens = ")[1].split()[0])
        else:
            assert attempt > 0
            return
    pytest.fail("following the message did not lead to a size that fits")


def test_one_row_that_does_not_fit_asks_for_fewer_tokens_at_once(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make_backend()
    batch = roll(backend, requests)
    longest = max(batch.rows, key=lambda row: len(row.tokens_T))
    memory = SmallMemory(trainer_of(backend)._model, len(longest.tokens_T) - 3)
    with pytest.raises(BackendError, match="with one row of") as caught:
        backend.train(replace(batch, rows=(longest,)))
    assert memory.refused == 1, "a single row cannot be halved"
    tokens = int(caught.value.problems[0].fix.split("max_tokens to ")[1].split(",")[0])
    assert 1 <= tokens < longest.action_T.sum()


def test_sampling_halves_its_cache_once_and_draws_the_same_completions(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], caplog: pytest.LogCaptureFixture
) -> None:
    plain, short = make_backend(), make_backend()
    wanted = plain.sample(requests, PARAMS)
    memory = SmallMemory(short._policy.sampler, 17 * 30)
    with caplog.at_level(logging.WARNING, logger="retrain"):
        drawn = short.sample(requests, PARAMS)
    assert memory.refused == 1
    assert "Out of memory in sampling" in caplog.text
    for left, right in zip((s for g in wanted for s in g), (s for g in drawn for s in g), strict=True):
        assert left.tokens_T.tolist() == right.tokens_T.tolist()
        assert left.stop_reason is right.stop_reason
        np.testing.assert_allclose(left.logprobs_T, right.logprobs_T, atol=1e-5)
        np.testing.assert_allclose(left.entropies_T, right.entropies_T, atol=1e-5)
    short.sample(requests, PARAMS)
    assert memory.refused == 1, "the smaller cache is kept"


def test_sampling_that_does_not_fit_in_half_either_says_how_many_would(
    make_backend: MakeBackend, requests: Sequence[SampleRequest]
) -> None:
    backend = make_backend()
    SmallMemory(backend._policy.sampler, 40)
    with pytest.raises(BackendError, match="keys and values") as caught:
        backend.sample(requests, PARAMS)
    problem = caught.value.problems[0]
    assert problem.where == "sampling"
    assert "batch_size or group_size" in problem.fix or "max_tokens" in problem.fix


def test_a_resumed_backend_cuts_its_work_as_before(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    backend, resumed = make_backend(), make_backend()
    batch = roll(backend, requests)
    SmallMemory(trainer_of(backend)._model, tokens_of(batch) - 1)
    backend.train(batch)
    backend.save(tmp_path)
    assert json.loads((tmp_path / "backend_state.json").read_text())["memory_limits"]["train_tokens"] > 0
    resumed.load(tmp_path)
    for each in (backend, resumed):
        each.train(batch)
    assert torch.equal(weights(backend), weights(resumed))


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (BackendError("the disk ran out of memory"), False),
    ],
)
def test_only_allocators_run_out_of_memory(error: RuntimeError, wanted: bool) -> None:
    assert is_out_of_memory(error) is wanted


def test_the_biggest_tensor_is_the_logits_or_a_layers_activations(make_backend: MakeBackend) -> None:
    model, cpu = trainer_of(make_backend())._model, torch.device("cpu")
    few = too_big_to_train(Load(rows=4, width=100, actions=2), 0, model, cpu)
    many = too_big_to_train(Load(rows=4, width=100, actions=380), 0, model, cpu)
    assert "activations of a layer [4, 100, 384], 0.6 MiB" in few.problems[0].what
    assert "logits [380, 512], 0.7 MiB" in many.problems[0].what
