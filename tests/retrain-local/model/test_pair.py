"""One set of frozen weights, two decoders, and what passes between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrain_local.memory import sizes
from retrain_local.model import projection
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.local_backend import Local
from tests.kit.local_pairs import held, logits_of, num_bytes, own_tensors, relative, shake

CPU = torch.device("cpu")


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_frozen_weights_exist_once_and_never_drift(
    model_folder: Path, local: Local, merge_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    pair = local.pair(model_folder)
    frozen = held(pair.trained)
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


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_several_samplers_and_an_adapter_that_is_handed_over(
    model_folder: Path, local: Local, merge_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
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
@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_prepacked_matrices_change_no_logit(
    model_folder: Path, local: Local, merge_limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every matrix in oneDNN's layout; none of this model is large enough otherwise."""
    if not projection.can_prepack(dtype):
        pytest.skip("PyTorch has no prepacked product here")
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
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
