"""What layers keep for the backward pass: a shallow copy says it before the model is loaded."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.memory.sizes import ALIKE, Rows
from retrain_local.model.measure import measure
from tests.kit.causal_types import small_model
from tests.kit.local_backend import Local


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1", "deepseek_v3", "gptj", "gemma3n_text", "nemotron_h"])
def test_a_copy_of_few_layers_keeps_what_the_model_does(kind: str, local: Local, tmp_path: Path) -> None:
    inner = {} if kind == "gptj" else {"intermediate_size": 768, "moe_intermediate_size": 128}
    small_model(kind, max_position_embeddings=512, **inner).save_pretrained(tmp_path)
    decoder = local.pair(tmp_path).trained
    whole, copied = decoder.shape.activations(), measure(tmp_path, rank=4)
    assert copied is not None
    assert copied.activations is not None
    for rows in (ALIKE, Rows(longest=30), Rows(longest=400, repeats=3.0)):
        found, wanted = (each.of(rows, recompute=False, inputs=0) for each in (copied.activations, whole))
        assert found == pytest.approx(wanted, rel=0.1)


def test_measuring_leaves_no_tensor_behind(local: Local, tmp_path: Path) -> None:
    small_model("lfm2", max_position_embeddings=512).save_pretrained(tmp_path)
    decoder = local.pair(tmp_path).trained

    def graphs() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in gc.get_objects())

    before = graphs()
    decoder.shape.activations()
    assert graphs() == before


@pytest.mark.parametrize("kind", ["rwkv", "xlstm", "roberta"])
def test_a_copy_of_few_layers_has_the_tier_and_the_states_of_the_model(kind: str, local: Local, tmp_path: Path) -> None:
    small_model(kind).save_pretrained(tmp_path)
    copied, shape = measure(tmp_path, rank=4), local.pair(tmp_path).trained.shape
    assert copied is not None
    assert not copied.why, "the tier paged"
    assert copied.row_bytes == pytest.approx(shape.row_bytes, rel=0.01)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma2", "gptj"])
def test_the_measured_elements_are_those_of_a_pack(kind: str, local: Local, tmp_path: Path) -> None:
    small_model(kind, max_position_embeddings=512).save_pretrained(tmp_path)
    decoder = local.pair(tmp_path).trained
    prompt, own, count = 40, 60, 4
    spans = Spans(lengths=(prompt, *[own] * count), prefixes=(-1, *[0] * count))
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        attend = decoder.packed(PaddedAttend)(spans, decoder.device)
        decoder.hidden(torch.arange(spans.num_tokens) % 150, torch.from_numpy(spans.positions()), attend)
    found = sum(storage.nbytes() for storage in kept.values()) / 4 / spans.num_tokens
    rows = Rows(longest=prompt + own, repeats=count * (prompt + own) / spans.num_tokens)
    measured = decoder.shape.activations()
    planned = measured.of(rows, recompute=False, inputs=0)
    assert 0.7 * found < planned - measured.largest < 1.3 * found
