"""One set of frozen weights, two decoders, and what passes between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retrain_local.memory import sizes
from retrain_local.model import projection
from retrain_local.model.checkpoint import load_state, save_state
from retrain_local.model.pair import Pair
from retrain_local.plugin import BUILTIN_MODELS
from retrain_local.training.adamw import AdamW
from tests.kit.local_backend import Local
from tests.kit.local_pairs import logits_of, shake

CPU = torch.device("cpu")


def tensors_of(thing: object, seen: set[int] | None = None) -> dict[int, Tensor]:
    """Every tensor that an object holds, by the address of its memory; prepacked ones have none."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return {} if thing.is_mkldnn else {thing.untyped_storage().data_ptr(): thing}
    if isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, dict):
        parts = list(thing.values())
    elif type(thing).__module__.startswith("retrain_local"):
        names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
        parts = [getattr(thing, name) for name in names]
    else:
        return {}
    return {address: tensor for part in parts for address, tensor in tensors_of(part, seen).items()}


def size(tensors: dict[int, Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


def own(pair: Pair) -> dict[int, Tensor]:
    """The tensors of the sampler that the trained decoder does not hold."""
    trained = tensors_of(pair.trained)
    return {address: t for address, t in tensors_of(pair.sampler).items() if address not in trained}


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_frozen_weights_exist_once_and_never_drift(
    model_folder: Path, local: Local, merge_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    pair = local.pair(model_folder)
    frozen = tensors_of(pair.trained)
    adapter = {p.untyped_storage().data_ptr() for p in pair.parameters.values()}
    before = {address: t.clone() for address, t in frozen.items() if address not in adapter}
    matrices = 4 * 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64)  # bytes of q, k v, o, gate up down
    if merge_limit:
        assert matrices < size(own(pair)) < 1.01 * matrices
    else:
        assert size(own(pair)) < 0.25 * matrices
    shake(pair)
    for _ in range(20):
        pair.publish()
    assert all(torch.equal(frozen[address], value) for address, value in before.items())


def test_a_sampler_in_bf16_beside_a_trainer_in_fp32(model_folder: Path, local: Local) -> None:
    exact, rounded = local.pair(model_folder), local.pair(model_folder, sampler_dtype=torch.bfloat16)
    assert (rounded.trained.dtype, rounded.sampler.dtype) == (torch.float32, torch.bfloat16)
    for pair in (exact, rounded):
        shake(pair)
        pair.publish()
    with torch.no_grad():
        expected, found = logits_of(exact.sampler), logits_of(rounded.sampler).float()
        assert torch.equal(logits_of(exact.trained), logits_of(rounded.trained))
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < 3e-2


def test_small_updates_survive_bf16(model_folder: Path, local: Local) -> None:
    """Merged into bf16 matrices an update a thousandth of their size would be rounded away."""
    pair = local.pair(model_folder, sampler_dtype=torch.bfloat16)
    with torch.no_grad():
        before = logits_of(pair.sampler)
        for name, p in pair.parameters.items():
            if ".lora_B." in name:
                p.add_(1e-5)
        pair.publish()
        assert not torch.equal(logits_of(pair.sampler), before)


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
        assert size(own(packed)) < 0.5 * size(own(plain))  # no plain copy stays beside the prepacked one


def test_the_published_adapters_are_saved_beside_the_trained_one(
    model_folder: Path, local: Local, tmp_path: Path
) -> None:
    def optimizer(pair: Pair) -> AdamW:
        return AdamW(pair.parameters.values(), lr=0.1, betas=(0.9, 0.99), eps=1e-8, decay=0.0)

    first, second = local.pair(model_folder, seed=1), local.pair(model_folder, seed=2)
    older = {}
    for version in (2, 3, 4):
        older[version] = {name: tensor.clone() for name, tensor in first.adapter.items()}
        shake(first)
    save_state(first, optimizer(first).state, 5, tmp_path, published=older)
    version, published, _ = load_state(second, optimizer(second).state, tmp_path)
    assert version == 5
    assert [*published] == [2, 3, 4]
    for each, adapter in older.items():
        assert all(torch.equal(published[each][name], tensor) for name, tensor in adapter.items())
    assert all(torch.equal(first.adapter[name], tensor) for name, tensor in second.adapter.items())


@pytest.mark.long
def test_the_tiny_model_needs_neither_transformers_nor_peft() -> None:
    code = f"""
import sys, torch
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Source
from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Config
tables = {{"model": schema.ModelTable(model="builtin:tiny"), "lora": schema.LoraTable()}}
source = Source(path={str(BUILTIN_MODELS["tiny"])!r}, offline=True)
create_pair(Config(tables=tables), source, trainer_device=torch.device("cpu"), seed=1)
print(sorted({{"transformers", "peft", "huggingface_hub", "torch._dynamo", "accelerate"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
