"""ThunderKittens is built from source on a Hopper GPU: here a module with the functions that it has stands in."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from retrain_local.attention.kernel_check import packed_fault
from retrain_local.attention.padded import PaddedAttend
from retrain_local.attention.select_kernels import KittensAttend, kittens_refusal
from retrain_local.attention.spans import Spans
from retrain_local.decoder import Scores, Shape

CPU = torch.device("cpu")
SIZES = {"layers": 1, "hidden": 1, "inner": 1, "vocabulary": 1, "context": None, "parameters": 1}
SHAPE = Shape(heads=4, kv_heads=2, head_size=64, value_size=64, **SIZES)


class StandIn(ModuleType):
    """Grouped causal attention on [batch, heads, length, size] with a scale of its own, and its backward pass."""

    def __init__(self) -> None:
        super().__init__("thunderkittens")
        self.lengths: list[int] = []

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    def mha_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        assert causal
        assert q.is_contiguous()
        self.lengths.append(q.shape[2])
        return self.attended(q, k, v), torch.zeros(q.shape[:3])

    def mha_backward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | bool) -> tuple[Tensor, ...]:
        _, _, gradient, causal = rest
        assert causal
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            found = torch.autograd.grad(self.attended(*leaves), leaves, gradient)
        return tuple(x.float() for x in found)


@pytest.fixture
def kittens(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "thunderkittens", module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_gradients_are_those_of_plain_pytorch(kittens: StandIn, dtype: torch.dtype) -> None:
    assert packed_fault(KittensAttend, SHAPE, CPU, dtype) is None
    assert set(kittens.lengths) == {768}


@pytest.mark.parametrize("scores", [Scores(scale=0.3), Scores(scale=0.125, window=4), Scores(scale=0.125, softcap=2.0)])
def test_what_the_kernel_lacks_is_padded(kittens: StandIn, scores: Scores) -> None:
    spans = Spans(lengths=(5, 3), prefixes=(-1, 0))
    q, k, v = (torch.randn(8, heads, 64) for heads in (4, 2, 2))
    torch.testing.assert_close(
        KittensAttend(spans, CPU)(0, q, k, v, scores), PaddedAttend(spans, CPU)(0, q, k, v, scores)
    )
    assert kittens.lengths == []


def test_refusals() -> None:
    assert kittens_refusal(torch.bfloat16, SHAPE) is None
    assert "bfloat16" in str(kittens_refusal(torch.float16, SHAPE))
    assert "96" in str(kittens_refusal(torch.bfloat16, replace(SHAPE, head_size=96)))
