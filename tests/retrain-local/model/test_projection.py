"""Fused products with an adapter, in the precision that large models are trained in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retrain_local.memory.sizes import PREPACK_FROM
from retrain_local.model import operations
from retrain_local.model import projection as prepacked
from retrain_local.model.adapter import Adapter, Lora, create_adapters
from retrain_local.model.fused import PLAIN_GATES
from retrain_local.model.projection import (
    Plain,
    Prepacked,
    SampledLowRank,
    SampledMerged,
    TrainedLowRank,
    TrainedMerged,
    can_prepack,
    frozen_matrix,
    own_matrix,
    times,
)
from retrain_local.model.weights import Linear
from tests.kit.local_pairs import relative

SIZES, INPUTS, RANK = (32, 16, 16), 24, 4


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def fused(dtype: torch.dtype, *, biased: bool) -> Linear:
    weight, bias = drawn(sum(SIZES), INPUTS) * 0.2, drawn(sum(SIZES))
    return Linear(weight=weight.to(dtype), bias=bias.to(dtype) if biased else None, names=("q", "k", "v"), sizes=SIZES)


def adapted(linear: Linear) -> Adapter:
    (adapter,) = create_adapters([linear], Lora(rank=RANK, alpha=2 * RANK))
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


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gates_that_complete_a_product(dtype: torch.dtype, tolerance: float, biased: bool) -> None:
    whole = fused(dtype, biased=biased)
    sizes = (sum(SIZES) // 2,) * 2
    linear = replace(whole, names=("gate", "up"), sizes=sizes)
    adapter, x = adapted(linear), drawn(50, INPUTS).to(dtype).requires_grad_(True)
    product, asked = TrainedLowRank(adapter), [x, *adapter.parts_a, *adapter.parts_b]
    ways = product.gated(x, adapter, PLAIN_GATES), operations.swiglu(product(x))
    assert relative(*(way.detach() for way in ways)) < tolerance
    weights = drawn(50, sizes[0]).to(dtype)
    found, wanted = (torch.autograd.grad((way * weights).sum(), asked) for way in ways)
    for mine, other, leaf in zip(found, wanted, asked, strict=True):
        assert mine.dtype == leaf.dtype
        assert relative(mine, other) < tolerance
    with operations.made_again(again := product.gated(x, adapter, PLAIN_GATES)):
        (again * again).sum().backward()
    once = product.gated(x.detach(), adapter, PLAIN_GATES)
    (wanted_a, *_) = torch.autograd.grad((once * once).sum(), adapter.parts_a)
    gradient = adapter.parts_a[0].grad
    assert gradient is not None
    assert torch.equal(gradient, wanted_a)


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
            (zeros,) = create_adapters([linear], Lora(rank=RANK, alpha=2 * RANK))
            untrained = plain(x, linear, zeros)
            assert relative(sampled(x), untrained) < 1e-2  # nothing was taken yet
            sampled.take(adapter)
            assert relative(sampled(x), trained(x).double()) < (1e-6 if dtype == torch.float32 else 4e-3)
            assert relative(sampled(x), untrained) > 0.1


def test_an_optimizer_may_change_what_is_trained_in_place() -> None:
    """The parameters are views of the memory that the fused products read."""
    adapter = adapted(fused(torch.float32, biased=False))
    for p in adapter.named().values():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(adapter.named().values(), lr=0.5).step()
    assert torch.equal(adapter.a, torch.cat(adapter.parts_a))
    assert torch.equal(adapter.b, torch.cat(adapter.parts_b))
    assert all(part.is_contiguous() for part in (*adapter.parts_a, *adapter.parts_b))


WIDE = 512
LARGE, SMALL = PREPACK_FROM // WIDE, PREPACK_FROM // WIDE - 1  # outputs
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    can_prepack.cache_clear()
    yield
    can_prepack.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 32, 200])
def test_the_product_is_the_same_for_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = (drawn(*size, dtype=dtype) for size in ((LARGE, WIDE), (LARGE,), (rows, WIDE)))
    wanted = x.double() @ weight.double().T
    tolerance = (1e-6 if dtype == torch.float32 else 4e-3) * float(wanted.norm())
    with torch.inference_mode():
        for matrix in (frozen_matrix(weight), own_matrix(weight)):
            found = matrix.linear(x), matrix.linear(x, bias) - bias
            assert all(y.dtype == dtype for y in found)
            assert all(float((y.double() - wanted).norm()) < 2 * tolerance for y in found)


@pytest.mark.parametrize("outputs", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_product_of_a_backward_pass_is_the_same_for_any_layout(outputs: int, dtype: torch.dtype) -> None:
    weight, g = drawn(outputs, WIDE, dtype=dtype), drawn(7, outputs, dtype=dtype)
    for rows in (g, g[:1].expand(3, -1), g.T.contiguous().T, g[:0]):
        wanted = rows.double() @ weight.double()
        tolerance = (4e-3 if dtype == torch.bfloat16 else 1e-6) * float(wanted.norm())
        with torch.no_grad():
            found = times(rows, weight)
        assert found.dtype == dtype
        assert float((found.double() - wanted).norm()) <= 2 * tolerance


@pytest.mark.skipif(not can_prepack(torch.float32), reason="PyTorch has no prepacked product here")
def test_only_large_matrices_are_prepacked() -> None:
    assert isinstance(frozen_matrix(drawn(LARGE, WIDE)), Prepacked)
    assert isinstance(own_matrix(drawn(LARGE, WIDE)), Prepacked)
    others = (drawn(SMALL, WIDE), drawn(LARGE, WIDE, dtype=torch.float64), torch.empty(LARGE, WIDE, device="meta"))
    plain = [frozen_matrix(drawn(LARGE, WIDE), may_copy=False), *map(frozen_matrix, others)]
    assert all(isinstance(matrix, Plain) for matrix in plain)


@pytest.mark.parametrize("outputs", [SMALL, LARGE])
def test_taking_other_numbers_leaves_the_tensor_alone(outputs: int) -> None:
    weight, other, x = drawn(outputs, WIDE), 2 * drawn(outputs, WIDE), drawn(5, WIDE)
    kept, matrix = weight.clone(), own_matrix(weight)
    before = matrix.linear(x)
    matrix.take(other)
    assert torch.equal(weight, kept)
    torch.testing.assert_close(matrix.linear(x), 2 * before, rtol=1e-4, atol=1e-3)
    other.zero_()
    assert float(matrix.linear(x).abs().max()) > 1.0  # it does not follow the tensor that it took


@pytest.mark.parametrize("kind", ["fails", "is wrong", "was not measured here"])
def test_a_product_that_fails_or_is_wrong_is_not_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Tensor, *_: object) -> Tensor:
        if kind == "fails":
            raise NotImplementedError("no kernel here")
        return torch.zeros(len(x), 48)

    if kind == "was not measured here":
        monkeypatch.setattr(prepacked.platform, "machine", lambda: "arm64")
    else:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    assert not can_prepack(torch.float32)
    weight = drawn(LARGE, WIDE)
    matrix = frozen_matrix(weight)
    assert isinstance(matrix, Plain)
    assert torch.equal(matrix.linear(weight[:2]), torch.nn.functional.linear(weight[:2], weight))


def test_training_multiplies_by_the_samplers_matrix_while_it_holds_the_same_adapter() -> None:
    linear = fused(torch.float32, biased=True)
    adapter, x = adapted(linear), drawn(9, INPUTS).float()
    alone, product, sampled = TrainedMerged(adapter), TrainedMerged(adapter), SampledMerged(linear)
    product.shared = sampled
    sampled.take(adapter)
    assert sampled.holds(adapter)
    assert not sampled.holds(adapter.copied())
    with torch.no_grad():
        assert torch.equal(product(x), sampled(x))
        adapter.parts_b[0].add_(1.0)  # an optimizer's update that is not published yet
        assert not sampled.holds(adapter)
        assert torch.equal(product(x), alone(x))
        assert relative(product(x), sampled(x).double()) > 1e-2
        sampled.take(adapter)
        assert torch.equal(product(x), sampled(x))
        sampled.take(adapter.copied())  # another version's numbers
        assert not sampled.holds(adapter)
