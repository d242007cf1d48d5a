"""The estimate: its terms by hand, its constants against the backend's own, and that more work never needs less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.capacity import local_backend as local
from retrain.capacity.memory import Estimate, Phase, estimate, grown_capacity
from retrain.capacity.shape import ModelShape
from retrain.capacity.workload import Workload

WORK = Workload(
    device="cpu", batch_size=2, group_size=4, max_tokens=16, prompt_tokens=20, lora_rank=4, micro_batch_tokens=2048
)
SHAPE = ModelShape(
    layers=2,
    hidden=8,
    inner=16,
    heads=2,
    kv_heads=1,
    head_size=4,
    vocabulary=10,
    is_tied=False,
    has_gate=True,
    experts=0,
    parameters=1352,
    is_counted=True,
    context=None,
)


def phase(found: Estimate, name: str) -> Phase:
    (wanted,) = (each for each in found.phases if each.name == name)
    return wanted


def test_what_is_always_there_by_hand() -> None:
    found = estimate(SHAPE, WORK, runtime_bytes=1000)
    lora = 4 * 2 * (16 + 24 + 16 + 72) * 4  # rank x layers x (in + out), fp32
    assert dict(found.resident) == {
        "runtime": 1000,
        "weights": 1352 * 4,
        "sampler": SHAPE.adapted_elements * 4,
        "adapter": lora,
        "optimizer": 2 * lora,
        "host": 8 * 16 * local.HOST_TOKEN_BYTES,
    }
    assert found.peak_bytes == max(sum(found.resident.values()) + sum(each.parts.values()) for each in found.phases)


def test_training_by_hand() -> None:
    parts = phase(estimate(SHAPE, WORK), "training").parts
    tokens = 8 * (20 + 16 - 1)
    saved = 4 * 8 + 3 * 8 + 3 * 4 + 4 * 16 + 7 * 4  # per token and layer, elements
    assert parts["activations"] == pytest.approx(tokens * 2 * saved * 4 * local.HEAP_WASTE, abs=2)
    backward = tokens * (2 * 16 + 8) * 4
    logits = 4 * 8 * 16 * 10 * 4  # logits, their gradient, and two chunks
    assert parts["backward"] == pytest.approx(max(backward, logits) * local.HEAP_WASTE, abs=2)
    assert parts["gradients"] == SHAPE.lora_parameters(4) * 4


def test_the_cache_by_hand() -> None:
    parts = phase(estimate(SHAPE, WORK), "sampling").parts
    per_token = 2 * 2 * 1 * 4 * 4
    capacity = grown_capacity(20, 16)
    assert capacity == 21 + 64
    assert parts["kv_cache"] == 8 * capacity * per_token  # a row's 85 positions lie within one page
    assert parts["cache_growth"] == 8 * 36 * per_token // 2


@pytest.mark.parametrize(
    ("prompt", "new", "capacity"), [(25, 0, 25), (25, 1, 90), (25, 65, 90), (25, 66, 91 + 64), (200, 1, 201 + 100)]
)
def test_the_cache_grows_as_the_backend_grows_it(prompt: int, new: int, capacity: int) -> None:
    assert grown_capacity(prompt, new) == capacity


def test_the_growth_is_that_of_the_backends_own_cache() -> None:
    torch = pytest.importorskip("torch")
    from retrain_local.kv_cache import GrowingLayer

    for prompt, new in [(25, 16), (25, 70), (100, 300), (1, 1), (130, 65)]:
        layer = GrowingLayer()
        for length in (prompt, *[1] * new):
            layer.update(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1))
        assert layer.keys is not None
        assert layer.keys.shape[2] == grown_capacity(prompt, new)


def test_the_sizes_are_those_of_the_backend() -> None:
    pytest.importorskip("torch")
    from retrain_local import draw, engine, kv_cache, lora, loss, microbatch

    assert microbatch.TOKEN_BUDGET == local.TRAIN_TOKENS
    assert microbatch.LOGIT_BUDGET == local.TRAIN_LOGITS
    assert loss.CHUNK_ELEMENTS == local.LOSS_CHUNK
    assert draw.CHUNK_ELEMENTS == local.DRAW_CHUNK
    assert engine.PREFILL_TOKENS == local.PREFILL_TOKENS
    assert engine.SEGMENT == local.SEGMENT
    assert engine.CPU_CACHE_BYTES == local.CACHE_BYTES_CPU
    assert engine.GPU_CACHE_SHARE == local.CACHE_SHARE_GPU
    assert kv_cache.MIN_CHUNK == local.CACHE_CHUNK
    assert lora.MERGE_LIMIT == local.MERGE_LIMIT


def test_large_blocks_cost_what_they_hold() -> None:
    wide = replace(SHAPE, inner=2**14)
    small = replace(WORK, micro_batch_tokens=64)
    large = replace(WORK, batch_size=64, micro_batch_tokens=2**16)
    per_token = []
    for work in (small, large):
        training = phase(estimate(wide, work), "training")
        _, _, inner = training.biggest.shape
        assert inner == 2**14
        per_token.append(training.parts["activations"] / (training.biggest.bytes / 4 / inner))
    assert per_token[1] < per_token[0]


def test_a_gpu_keeps_one_activation_per_layer_and_bf16_weights(qwen: ModelShape) -> None:
    work = replace(WORK, batch_size=8, group_size=16, max_tokens=1024, lora_rank=32, device="cuda")
    found = estimate(qwen, replace(work, micro_batch_tokens=16384), device_bytes=80 * 2**30)
    assert found.resident["weights"] == qwen.parameters * 2
    assert found.resident["sampler"] == found.resident["adapter"]  # too large to merge: copies of A and B
    assert "host" not in found.resident
    assert 8 * 2**30 < found.peak_bytes < 80 * 2**30
    on_cpu = estimate(qwen, replace(work, device="cpu", micro_batch_tokens=16384))
    assert phase(found, "training").parts["activations"] < phase(on_cpu, "training").parts["activations"] / 4


def test_the_biggest_tensor_of_a_large_vocabulary_is_named(qwen: ModelShape) -> None:
    work = replace(WORK, max_tokens=2000, micro_batch_tokens=2**14)
    biggest = estimate(qwen, work).biggest
    assert str(biggest).startswith("logits [2000, 151936], ") or str(biggest).startswith("embedding")
    assert phase(estimate(SHAPE, WORK), "training").biggest.name == "activations of a layer"


@given(
    st.sampled_from(["batch_size", "group_size", "max_tokens", "prompt_tokens", "lora_rank"]),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_more_work_never_needs_less(name: str, one: int, other: int) -> None:
    few, many = (estimate(SHAPE, WORK.with_size(name, value)) for value in sorted((one, other)))
    assert few.peak_bytes <= many.peak_bytes * 1.35  # padding of micro-batches, and pages, are not smooth
    assert sum(few.resident.values()) <= sum(many.resident.values())
