"""Fused products with an adapter, in the precision that large models are trained in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrain_local.model.adapter import Adapter, create_adapters
from retrain_local.model.projection import SampledLowRank, SampledMerged, TrainedLowRank, TrainedMerged
from retrain_local.model.weights import Linear

SIZES, INPUTS, RANK = (32, 16, 16), 24, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fused(dtype: torch.dtype, *, biased: bool) -> Linear:
    weight, bias = drawn(sum(SIZES), INPUTS) * 0.2, drawn(sum(SIZES))
    return Linear(weight=weight.to(dtype), bias=bias.to(dtype) if biased else None, names=("q", "k", "v"), sizes=SIZES)


def adapted(linear: Linear) -> Adapter:
    (adapter,) = create_adapters([linear], rank=RANK, alpha=2 * RANK, seed=0)
    with torch.no_grad():
        for b in adapter.parts_b:
            b.copy_(drawn(*b.shape) * 0.1)
    return adapter


def plain(x: Tensor, linear: Linear, adapter: Adapter) -> Tensor:
    """One matrix after the other, in fp64."""
    rows = linear.weight.double().split(SIZES)
    updates = [adapter.scale * b.double() @ a.double() for a, b in zip(adapter.parts_a, adapter.parts_b, strict=True)]
    y = torch.cat([x.double() @ (w + update).T for w, update in zip(rows, updates, strict=True)], dim=1)
    return y if linear.bias is None else y + linear.bias.double()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


CASES = [
    (TrainedMerged, torch.float32, 1e-6),
    (TrainedLowRank, torch.float32, 1e-6),
    (TrainedLowRank, torch.bfloat16, 1e-2),
]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("kind", "dtype", "tolerance"), CASES)
def test_training(
    kind: type[TrainedMerged] | type[TrainedLowRank], dtype: torch.dtype, tolerance: float, biased: bool
) -> None:
    linear = fused(dtype, biased=biased)
    adapter = adapted(linear)
    x, weights = drawn(50, INPUTS).to(dtype).requires_grad_(True), drawn(50, sum(SIZES)).to(dtype)
    asked = [x, *adapter.parts_a, *adapter.parts_b]
    found, expected = kind(adapter)(x), plain(x, linear, adapter)
    assert found.dtype == dtype
    assert relative(found.detach(), expected.detach()) < tolerance
    with torch.no_grad():
        assert relative(kind(adapter)(x), expected) < tolerance
    gradients = torch.autograd.grad((found * weights).sum(), asked)
    wanted = torch.autograd.grad((expected * weights.double()).sum(), asked)
    for mine, other, leaf in zip(gradients, wanted, asked, strict=True):
        assert mine.dtype == leaf.dtype  # fp32 for the adapter
        assert relative(mine, other.double()) < 2 * tolerance
    frozen = torch.autograd.grad((kind(adapter)(x.detach()) * weights).sum(), asked[1:])
    assert all(torch.equal(mine, other) for mine, other in zip(frozen, gradients[1:], strict=True))


def test_the_backward_pass_does_not_multiply_by_a_again() -> None:
    """Products backwards: two for each part, one for all of A, and the gradient of x with W and with A."""
    products: list[str] = []

    class Noting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.extend(name for name in [func.overloadpacket.__name__] if name in ("mm", "addmm_"))
            return func(*args, **(kwargs or {}))

    adapter = adapted(fused(torch.bfloat16, biased=False))
    x = drawn(50, INPUTS).bfloat16().requires_grad_(True)
    y = TrainedLowRank(adapter)(x)
    with Noting():
        torch.autograd.backward(y, torch.ones_like(y))
    assert sorted(products) == ["addmm_", *["mm"] * (2 * len(SIZES) + 2)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_is_training_without_a_gradient(dtype: torch.dtype, biased: bool) -> None:
    linear = fused(dtype, biased=biased)
    adapter = adapted(linear)
    x = drawn(9, INPUTS).to(dtype)
    pairs: list[tuple[SampledMerged | SampledLowRank, TrainedMerged | TrainedLowRank]]
    pairs = [(SampledLowRank(linear, RANK), TrainedLowRank(adapter))]
    if dtype == torch.float32:
        pairs.append((SampledMerged(linear), TrainedMerged(adapter)))
    for sampled, trained in pairs:
        with torch.no_grad():
            untrained = plain(x, linear, adapted_with_zeros(linear))
            assert relative(sampled(x), untrained) < 1e-2  # nothing was taken yet
            sampled.take(adapter)
            assert relative(sampled(x), trained(x).double()) < (1e-6 if dtype == torch.float32 else 4e-3)
            assert relative(sampled(x), untrained) > 0.1


def adapted_with_zeros(linear: Linear) -> Adapter:
    (adapter,) = create_adapters([linear], rank=RANK, alpha=2 * RANK, seed=0)
    return adapter


def test_an_optimizer_may_change_what_is_trained_in_place() -> None:
    """The parameters are views of the memory that the fused products read."""
    adapter = adapted(fused(torch.float32, biased=False))
    for p in adapter.named().values():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(adapter.named().values(), lr=0.5).step()
    assert torch.equal(adapter.a, torch.cat(adapter.parts_a))
    assert torch.equal(adapter.b, torch.cat(adapter.parts_b))
    assert all(part.is_contiguous() for part in (*adapter.parts_a, *adapter.parts_b))
