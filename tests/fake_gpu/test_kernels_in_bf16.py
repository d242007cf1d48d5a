"""Kernels in Triton's interpreter in bf16, the dtype that they run in, against the same operations in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.shapes import shape
from tests.kit.triton_interpreter import INTERPRETER, run_interpreted

pytestmark = [pytest.mark.fake_gpu, pytest.mark.slow]
CPU, BF16 = torch.device("cpu"), torch.bfloat16
HAS_TRITON = find_spec("triton") is not None
interpreted = pytest.mark.skipif(os.environ.get(INTERPRETER) != "1" or not HAS_TRITON, reason="runs in the interpreter")
HEADS = {
    "4 queries a key, as Qwen3": shape(8, 2, 128),
    "7 queries a key, as Qwen2": shape(7, 1, 64),
    "heads of 96": shape(2, 2, 96),
    "heads of 256": shape(8, 1, 256),
    "17 queries a key": shape(17, 1, 16),
}
STORED = {"bf16": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# With 132 multiprocessors keys are cut into several stretches, with one they are not.
PAGED = [(132, heads, stored) for heads in HEADS for stored in STORED] + [
    (1, next(iter(HEADS)), each) for each in STORED
]
LAYERS = {
    "three heads of 80": shape(3, 1, 80, hidden=240, inner=1500),
    "a hidden size of 2560": shape(4, 2, 128, hidden=2560, inner=1024),
}
RANKS = 4, 8, 16, 32, 70  # below, at and above a tile


@pytest.fixture(scope="module", autouse=True)
def _in_bf16() -> Iterator[None]:
    if os.environ.get(INTERPRETER) != "1" or not HAS_TRITON:
        yield
        return
    from tests.kit.bf16_interpreter import bf16_interpreted

    with bf16_interpreted():
        yield


@interpreted
@pytest.mark.parametrize(("count", "heads", "stored"), PAGED)
def test_attention_over_pages(count: int, heads: str, stored: str) -> None:
    from retrain_local.attention.paged_triton import TritonPages
    from retrain_local.attention.select_kernels import paged_faults

    assert not list(paged_faults(TritonPages(count), HEADS[heads], CPU, BF16, STORED[stored]))


@interpreted
@pytest.mark.parametrize("vocabulary", [12_288, 10_007])
def test_the_softmax_of_training(vocabulary: int) -> None:
    from retrain_local.training.head import softmax_faults
    from retrain_local.training.head_triton import triton_softmax

    assert not list(softmax_faults(triton_softmax, device=CPU, dtype=BF16, vocabulary=vocabulary))


@interpreted
@pytest.mark.parametrize("vocabulary", [151_936, 10_007])
def test_the_draw(vocabulary: int) -> None:
    from retrain_local.sampling.draw import draw_faults
    from retrain_local.sampling.draw_triton import draw_tokens

    assert not list(draw_faults(draw_tokens, CPU, BF16, vocabulary))


@interpreted
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_operations_between_products(layer: Any) -> None:
    from retrain_local.model.fused import faults
    from retrain_local.model.operations_triton import OPERATIONS

    assert not list(faults(OPERATIONS, CPU, BF16, layer))


@interpreted
@pytest.mark.parametrize("rank", RANKS)
def test_operations_behind_an_adapter(rank: int) -> None:
    from retrain_local.model.decode_triton import GATES, KERNELS
    from retrain_local.model.fused import decode_faults, gate_faults

    layer = shape(4, 2, 64, hidden=256, inner=128)
    assert not list(decode_faults(KERNELS, CPU, BF16, layer, rank))
    assert not list(gate_faults(GATES, CPU, BF16, layer, rank))


@interpreted
def test_a_wrong_number_is_noticed() -> None:
    from retrain_local.training.head import plain_softmax, softmax_faults

    def wrong(*given: Any) -> Any:
        logprobs_M, slope_MV = plain_softmax(*given)
        return logprobs_M * 1.01, slope_MV

    assert list(softmax_faults(wrong, device=CPU, dtype=BF16, vocabulary=100))


@pytest.mark.skipif(INTERPRETER in os.environ or not HAS_TRITON, reason="the other tests of this file run as they are")
def test_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))
