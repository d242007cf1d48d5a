"""Every way of sampling and training against the plain one: a row at a time through transformers and PEFT.

fp32: the on-policy ratio and the gradient to 1e-4; bf16: to 2e-2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from retrain.api import SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.model import load, pair
from retrain_local.sampling import schedule
from tests.kit.shared import first_or_long

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]
MODES: dict[str, dict[str, Any]] = {
    "shared prefix": {},
    "prompts apart": {"inference": {"prefix_caching": False}},
    "paged": {"cache_tokens": 300},
    "small packs": {"train_tokens": 50},
    "recomputed": {"recompute": True},
    "split": {"devices": "cpu,cpu"},
}
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def usual_model(save_model: Callable[[Path, Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as large as architectures are initialised with; those of the other tests are made to disagree."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 512}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True, initializer_range=0.02))
    return save_model(tmp_path_factory.mktemp("usual"), model)


def made(make_backend: MakeBackend, mode: str) -> LocalBackend:
    options = dict(MODES[mode])
    limits = {name: options.pop(name) for name in ("cache_tokens", "train_tokens", "recompute") if name in options}
    backend = make_backend(**options)
    for name, value in limits.items():
        setattr(backend._policies[0].limits, name, value)
    if "recompute" in limits:
        backend._policies[0].limits.pack_tokens = 1000
    return backend


def plain_gradient(batch: TrainBatch, model: Any) -> dict[str, Tensor]:
    total = torch.zeros(())
    for row in batch.rows:
        tokens_T = torch.from_numpy(row.tokens_T)
        logits = model(input_ids=tokens_T[None]).logits[0, :-1].float() / batch.temperature
        logp = torch.log_softmax(logits, -1).gather(1, tokens_T[1:, None])[:, 0]
        rho = (logp - torch.from_numpy(row.logprobs_T)[1:]).exp()
        total = total - (rho * torch.from_numpy(row.advantages_T * row.action_T)[1:]).sum() / batch.num_actions
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient(backend: LocalBackend, batch: TrainBatch) -> dict[str, Tensor]:
    trainer = backend._trainer
    assert trainer is not None
    trainer.accumulate(batch)
    found = {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}
    trainer.optimizer.zero_grad()
    return found


def joined(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].float().flatten() for name in sorted(gradients)])


def after_one_step(backend: LocalBackend, requests: Sequence[SampleRequest], roll: Roll) -> TrainBatch:
    """A batch that the policy sampled when its adapter was no longer zero."""
    backend.train(roll(backend, requests))
    backend.publish()
    return roll(backend, requests, step=1, temperature=TEMPERATURE, max_tokens=60)


def compare(
    backend: LocalBackend, batch: TrainBatch, folder: Path, adapter: Path, dtype: torch.dtype, tolerance: float
) -> None:
    backend.save_adapter(adapter)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    found, wanted = gradient(backend, batch), plain_gradient(batch, model)
    assert set(found) == set(wanted)
    assert float((joined(found) - joined(wanted)).norm() / joined(wanted).norm()) < tolerance
    report = backend.train(batch)
    assert report.gap_max < tolerance
    assert report.ratio_max == pytest.approx(1.0, abs=tolerance)


@pytest.mark.parametrize("mode", first_or_long(MODES))
def test_ratio_and_gradient_are_the_plain_ones_in_fp32(
    make_backend: MakeBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    model_folder: Path,
    tmp_path: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "HEADROOM", 8)  # so that these short rows run out of blocks in their middle
    backend = made(make_backend, mode)
    batch = after_one_step(backend, requests, roll)
    assert len({row.action_T.sum() for row in batch.rows}) > 5
    if mode == "paged":
        assert backend.metrics()["engine_rows_put_aside"] > 0
    compare(backend, batch, model_folder, tmp_path, torch.float32, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_ratio_and_gradient_are_the_plain_ones_in_bf16(
    make_backend: MakeBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    usual_model: Path,
    tmp_path: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed = load._placement

    def as_on_a_gpu(*given: Any) -> pair.Placement:
        return replace(placed(*given), trainer_dtype=torch.bfloat16, sampler_dtype=torch.bfloat16)

    monkeypatch.setattr(load, "_placement", as_on_a_gpu)
    backend = made(partial(make_backend, usual_model), mode)
    assert backend._pair is not None
    assert backend._pair.trained.dtype == backend._pair.sampler.dtype == torch.bfloat16
    batch = after_one_step(backend, requests, roll)
    compare(backend, batch, usual_model, tmp_path, torch.bfloat16, 2e-2)
