"""The decoder of the Llama family against transformers and PEFT."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from retrain.api import BackendError, TrainBatch
from retrain_local.model import projection
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.llama import LlamaDecoder
from retrain_local.plugin import BUILTIN_MODELS
from retrain_local.training.head import selected_logprobs
from tests.kit.local_backend import Local, check_resumes, saved
from tests.kit.local_pairs import (
    IDS_N,
    SHARED,
    check_peft_agrees,
    held,
    hidden_of,
    logits_of,
    num_bytes,
    own_logits,
    own_tensors,
    relative,
    shake,
)
from tests.kit.problems import codes_in
from tests.kit.random_models import MODELS, random_model
from tests.kit.shared import first_or_long


@pytest.fixture(params=sorted(MODELS))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_model(request.param)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_in_bf16(named: tuple[Any, Path], local: Local) -> None:
    model, folder = named
    sampler = local.pair(folder, sampler_dtype=torch.bfloat16).sampler
    assert sampler.dtype == torch.bfloat16
    with torch.no_grad():
        exact, own = own_logits(model), own_logits(model.bfloat16(), IDS_N)
        found = logits_of(sampler)
    assert found.dtype == torch.bfloat16
    assert relative(found, exact) < max(2e-2, 1.5 * relative(own, exact))  # as close to fp32 as transformers' own


@pytest.mark.usefixtures("merge_limit")
def test_logits_and_gradients_are_those_of_peft(named: tuple[Any, Path], local: Local, tmp_path: Path) -> None:
    model, folder = named
    pair = local.pair(folder)
    assert isinstance(pair.trained, LlamaDecoder)
    with torch.no_grad():
        before = logits_of(pair.sampler)
        assert relative(before, own_logits(model)) < 1e-5
        shake(pair)
        assert torch.equal(logits_of(pair.sampler), before)
    check_peft_agrees(pair, model, tmp_path / "adapter")
    with torch.no_grad():
        assert relative(logits_of(pair.sampler), before) > 1e-2


WHOLE = ("llama tied with biases", "llama", "qwen2 with windows", "qwen3", "qwen3 with windows and biases")


@pytest.fixture(params=WHOLE)
def trained_whole(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_model(request.param)
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def own_logprobs(model: Any, row_T: Tensor) -> Tensor:
    logits = model(input_ids=row_T[None], use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, row_T[1:, None])[:, 0]


def test_the_gradient_of_every_weight_is_that_of_transformers(trained_whole: tuple[Any, Path], local: Local) -> None:
    """Through the head that makes its logits again, in chunks, with activations kept and recomputed."""
    model, folder = trained_whole
    pair = local.pair(folder, rank=0)
    theirs = {name: p for name, p in model.named_parameters() if name in pair.parameters}
    assert theirs.keys() == pair.parameters.keys()
    assert sum(p.numel() for p in theirs.values()) == pair.total == sum(p.numel() for p in model.parameters())
    weights_T = torch.randn(16, generator=torch.Generator().manual_seed(1))
    alone_T = IDS_N[-17:]
    wanted = torch.autograd.grad((own_logprobs(model, alone_T) * weights_T).sum(), list(theirs.values()))
    for recompute in (False, True):
        pair.trained.recompute = recompute
        hidden_TD = hidden_of(pair.trained)[-17:-1]
        given = pair.trained.logits, 2**22 // 5  # five rows of logits at a time
        logprobs_T = selected_logprobs(hidden_TD, alone_T[1:], *given, 1.0, parameters=pair.trained.head_parameters)
        found = torch.autograd.grad((logprobs_T * weights_T).sum(), list(pair.parameters.values()))
        by_name = dict(zip(pair.parameters, found, strict=True))
        for name, gradient in zip(theirs, wanted, strict=True):
            assert by_name[name].shape == gradient.shape
            assert relative(by_name[name], gradient) < 1e-4, name


def test_the_padding_token_gets_no_gradient_as_an_input_just_as_in_transformers(local: Local, tmp_path: Path) -> None:
    """In SmolLM2 that is the token which ends a turn."""
    model = random_model("llama")
    alone_T = IDS_N[-17:]
    model.config.pad_token_id = model.model.embed_tokens.padding_idx = int(alone_T[5])
    model.save_pretrained(tmp_path)
    pair = local.pair(tmp_path, rank=0)
    weights_TD = torch.randn(17, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(
        (model.model(alone_T[None]).last_hidden_state[0] * weights_TD).sum(), model.model.embed_tokens.weight
    )[0]
    found = torch.autograd.grad(
        (hidden_of(pair.trained)[-17:] * weights_TD).sum(), pair.parameters["model.embed_tokens.weight"]
    )[0]
    assert not found[alone_T[5]].any()
    assert relative(found, wanted) < 1e-4


def test_every_weight_is_published_and_saved(trained_whole: tuple[Any, Path], local: Local, tmp_path: Path) -> None:
    pair = local.pair(trained_whole[1], rank=0)
    with torch.no_grad():
        before = logits_of(pair.sampler)
        shake(pair, 0.3)
        assert torch.equal(logits_of(pair.sampler), before)
        pair.publish()
        trained = logits_of(pair.trained)
        assert relative(trained, before) > 1e-1
        assert relative(logits_of(pair.sampler), trained) < 1e-5
        folder = saved(tmp_path / "saved", partial(save_adapter, pair))
        assert relative(own_logits(AutoModelForCausalLM.from_pretrained(folder)), trained) < 1e-5
        assert torch.equal(logits_of(local.pair(folder, rank=0).trained), trained)
        kept = {name: tensor.clone() for name, tensor in pair.adapter.items()}
        shake(pair, 0.1)
        pair.publish(kept)  # as a resumed run with overlap does
        assert relative(logits_of(pair.sampler), trained) < 1e-5


def test_bf16_on_fp32_weights(trained_whole: tuple[Any, Path], local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain_local.model.load.bf16_refusal", lambda: None)
    exact, rounded = local.pair(trained_whole[1], rank=0), local.pair(trained_whole[1], rank=0, dtype="bf16")
    assert rounded.trained.dtype == rounded.sampler.dtype == torch.bfloat16
    assert {p.dtype for p in rounded.parameters.values()} == {torch.float32}
    weights = torch.randn(len(IDS_N), 200, generator=torch.Generator().manual_seed(1))
    names, found = list(exact.parameters), []
    theirs = dict(trained_whole[0].bfloat16().named_parameters())
    losses = [logits_of(pair.trained) for pair in (exact, rounded)] + [own_logits(trained_whole[0])]
    for logits, parameters in zip(losses, (exact.parameters, rounded.parameters, theirs), strict=True):
        gradients = torch.autograd.grad((logits.float() * weights).sum(), [parameters[name] for name in names])
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert relative(found[1], found[0]) < 1.5 * relative(found[2], found[0])  # as close as transformers' own
    with torch.no_grad():
        assert relative(logits_of(rounded.sampler), logits_of(rounded.trained)) < 2e-2


@pytest.mark.parametrize("dtype", first_or_long(["bf16", "fp32"]))
def test_a_sampler_holds_every_weight_once(
    dtype: str, trained_whole: tuple[Any, Path], local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These matrices are too small to be prepacked: this is what a GPU holds."""
    monkeypatch.setattr("retrain_local.model.load.bf16_refusal", lambda: None)
    pair = local.pair(trained_whole[1], rank=0, dtype=dtype)
    wanted = pair.total * {"fp32": 4, "bf16": 2}[dtype]
    assert wanted <= num_bytes(own_tensors(pair)) < wanted + 8192  # and norms of heads, expanded, and frequencies


def test_an_update_without_memory_says_what_to_do(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> float:
        raise torch.OutOfMemoryError("no room for moments")

    backend = local.make(rank=0)
    monkeypatch.setattr("retrain_local.training.adamw.AdamW.step", full)
    with pytest.raises(BackendError, match="train an adapter") as caught:
        backend.train(local.roll(backend))
    assert codes_in(caught) == ["memory.update-too-large"]


@pytest.mark.parametrize("stored", first_or_long([torch.float32, torch.bfloat16]))
def test_a_resumed_step_is_bit_identical(stored: torch.dtype, local: Local, model_folder: Path, tmp_path: Path) -> None:
    """Also where the model's own dtype, that of the files for users, would lose most of an update."""
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=stored).save_pretrained(base)
    straight = local.make(base, rank=0, lr=1e-3)
    straight.train(local.roll(straight))
    straight.publish()
    folder = saved(tmp_path / "saved", straight.save)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == stored
    assert (folder / "master_weights.safetensors").exists() == (stored != torch.float32)
    resumed = local.make(base, rank=0, lr=1e-3, seed=99)
    resumed.load(folder)
    check_resumes(local, straight, resumed, 1)


def test_a_step_changes_every_weight_but_the_reference_and_the_next_is_on_policy(local: Local) -> None:
    backend = local.make(rank=0, lr=1e-2)
    assert backend._pair is not None
    weights = {name: p.detach().clone() for name, p in backend._pair.parameters.items()}
    rows = local.roll(backend).rows
    before, trained = backend.reference_logprobs(rows, 0.7), backend.logprobs(rows, 0.7)
    assert all(np.array_equal(a, b) for a, b in zip(before, trained, strict=True))
    backend.train(TrainBatch(step=0, rows=rows, temperature=1.0))
    backend.publish()
    assert all(not torch.equal(p, weights[name]) for name, p in backend._pair.parameters.items())
    assert any(np.abs(a - b).max() > 1e-2 for a, b in zip(before, backend.logprobs(rows, 0.7), strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(before, backend.reference_logprobs(rows, 0.7), strict=True))
    rows = local.roll(backend, step=1).rows
    for row, found_T in zip(rows, backend.logprobs(rows, 1.0), strict=True):
        assert np.abs(found_T - row.logprobs_T)[row.action_T].max() < 1e-4


CPU = torch.device("cpu")


def test_frozen_weights_exist_once_and_never_drift(model_folder: Path, local: Local, merge_limit: int) -> None:
    pair = local.pair(model_folder)
    frozen = held(pair.trained, besides=SHARED)
    adapter = {p.untyped_storage().data_ptr() for p in pair.parameters.values()}
    before = {address: t.clone() for address, t in frozen.items() if address not in adapter}
    matrices = 4 * 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64)  # bytes of q, k v, o, gate up down
    if merge_limit:
        assert matrices < num_bytes(own_tensors(pair)) < 1.01 * matrices
    else:
        assert num_bytes(own_tensors(pair)) < 0.25 * matrices
    shake(pair)
    for _ in range(20):
        pair.publish()
    assert all(torch.equal(frozen[address], value) for address, value in before.items())


def test_a_sampler_in_bf16_beside_a_trainer_in_fp32(model_folder: Path, local: Local) -> None:
    exact, rounded = local.pair(model_folder), local.pair(model_folder, sampler_dtype=torch.bfloat16)
    assert (rounded.trained.dtype, rounded.sampler.dtype) == (torch.float32, torch.bfloat16)
    with torch.no_grad():
        before = logits_of(rounded.sampler)
        for name, p in rounded.parameters.items():
            p.add_(1e-5 * (".lora_B." in name))  # merged into bf16 matrices this would be rounded away
        rounded.publish()
        assert not torch.equal(logits_of(rounded.sampler), before)
        for pair in (exact, rounded):
            shake(pair)
            pair.publish()
        assert torch.equal(logits_of(exact.trained), logits_of(rounded.trained))
        assert 1e-4 < relative(logits_of(rounded.sampler).float(), logits_of(exact.sampler)) < 3e-2


@pytest.mark.usefixtures("merge_limit")
def test_several_samplers_and_an_adapter_that_is_handed_over(model_folder: Path, local: Local) -> None:
    pair = local.pair(model_folder, sampler_devices=(CPU, CPU))
    shake(pair)
    kept = {name: tensor.clone() for name, tensor in pair.adapter.items()}
    with torch.no_grad():
        pair.publish()
        published = logits_of(pair.sampler)
        for p in pair.parameters.values():
            p.mul_(1.5)
        pair.publish()
        assert not torch.equal(logits_of(pair.sampler), published)
        pair.publish(kept)
        for sampler in pair.samplers:
            assert torch.equal(logits_of(sampler), published)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepacked_matrices_change_no_logit(
    model_folder: Path, local: Local, merge_limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every matrix in oneDNN's layout; none of this model is large enough otherwise."""
    if not projection.can_prepack(dtype):
        pytest.skip("PyTorch has no prepacked product here")
    plain = local.pair(model_folder, sampler_dtype=dtype)
    shake(plain)
    plain.publish()
    monkeypatch.setattr(projection, "PREPACK_FROM", 1)
    packed = local.pair(model_folder, sampler_dtype=dtype)
    with torch.inference_mode():
        packed.publish(plain.adapter)
        found, wanted = logits_of(packed.sampler), logits_of(plain.sampler)
        assert float((found - wanted).abs().max()) < (1e-4 if dtype == torch.float32 else 6e-2)
    if merge_limit or dtype != torch.float32:
        assert num_bytes(own_tensors(packed)) < 0.5 * num_bytes(
            own_tensors(plain)
        )  # no plain copy stays beside the prepacked one


@pytest.mark.long
def test_a_step_of_the_tiny_model_needs_neither_transformers_nor_peft_nor_the_compiler() -> None:
    code = f"""
import sys, torch
from retrain_local.training.adamw import AdamW
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Source
from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Config
tables = {{"model": schema.ModelTable(model="builtin:tiny"), "lora": schema.LoraTable()}}
source = Source(path={str(BUILTIN_MODELS["tiny"])!r}, offline=True)
pair = create_pair(Config(tables=tables), source, trainer_device=torch.device("cpu"), seed=1)
for p in pair.parameters.values():
    p.grad = torch.ones_like(p)
AdamW(pair.parameters.values(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, decay=0.0).step()
print(sorted({{"transformers", "peft", "huggingface_hub", "torch._dynamo", "accelerate"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
