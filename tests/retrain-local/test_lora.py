from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.api import SampleRequest, TrainBatch
from retrain_local import lora
from retrain_local.backend import LocalBackend
from retrain_local.lora import attach_lora, trainable

MakeBackend = Callable[..., LocalBackend]


@pytest.fixture
def base(model_folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).requires_grad_(False).eval()


def attach(base: Any, **changes: Any) -> lora.Twins:
    return attach_lora(base, **({"rank": 4, "alpha": 0, "seed": 3, "name": "base"} | changes))


def test_every_linear_layer_but_the_head(base: Any) -> None:
    names = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    twins = attach(base)
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in trainable(twins.peft)}
    assert adapted == names - {"lm_head"}


@pytest.mark.parametrize(("alpha", "expected"), [(0, 8), (5, 5)])
def test_alpha_zero_is_twice_the_rank(base: Any, alpha: int, expected: int) -> None:
    assert attach(base, alpha=alpha).peft.peft_config["default"].lora_alpha == expected


def test_weights_come_from_the_seed_alone(model_folder: Any) -> None:
    drawn = []
    for noise, seed in ((1, 3), (2, 3), (2, 4)):
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        drawn.append({name: p.detach().clone() for name, p in trainable(attach(base, seed=seed).peft).items()})
        assert torch.equal(torch.get_rng_state(), before)
    first, again, other = drawn
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(p.any() == (".lora_A." in name) for name, p in first.items())


@pytest.mark.parametrize("merge_limit", [lora.MERGE_LIMIT, 0])
def test_frozen_weights_exist_once_and_never_drift(
    base: Any, merge_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "MERGE_LIMIT", merge_limit)
    original = {name: p.detach().clone() for name, p in base.named_parameters()}
    twins = attach(base)
    frozen = {n.replace(".base_layer", ""): p for n, p in twins.peft.get_base_model().named_parameters()}
    shared = {p.data_ptr() for p in twins.sampler.parameters()} & {p.data_ptr() for p in twins.peft.parameters()}
    assert frozen["model.embed_tokens.weight"].data_ptr() in shared
    assert (frozen["model.layers.0.mlp.up_proj.weight"].data_ptr() in shared) == (merge_limit == 0)
    for p in trainable(twins.peft).values():
        torch.nn.init.normal_(p, std=0.1)
    for _ in range(20):
        twins.publish()
    assert all(torch.equal(frozen[name], value) for name, value in original.items())


@pytest.mark.parametrize("merge_limit", [lora.MERGE_LIMIT, 0])
def test_sampler_changes_at_publish_and_then_equals_the_trained_model(
    base: Any, merge_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "MERGE_LIMIT", merge_limit)
    twins = attach(base)
    twins.publish()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        before = twins.sampler(input_ids=ids).logits
        for p in trainable(twins.peft).values():
            torch.nn.init.normal_(p, std=0.05)
        trained = twins.peft(input_ids=ids).logits
        assert torch.equal(twins.sampler(input_ids=ids).logits, before)
        twins.publish()
        published = twins.sampler(input_ids=ids).logits
    assert not torch.allclose(before, trained, atol=0.1)
    torch.testing.assert_close(published, trained, rtol=0, atol=1e-5 if merge_limit else 0)


def test_unmerged_sampling_gives_the_same_run(
    make_backend: MakeBackend,
    requests: list[SampleRequest],
    roll: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora, "MERGE_LIMIT", 0)
    backend = make_backend()
    backend.train(roll(backend, requests))
    backend.publish()
    report = backend.train(roll(backend, requests, step=1))
    assert abs(report.ratio_max - 1) < 1e-4
