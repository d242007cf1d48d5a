from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from retrain_local.model.adapter import create_adapters
from retrain_local.model.quantised import (
    FP8,
    Fp8Matrix,
    SampledFp8,
    fp8_refusal,
    rounded,
    rounding_faults,
    rounding_for,
    takes_fp8,
)
from retrain_local.model.weights import Linear

CPU = torch.device("cpu")


def rows_have_scales() -> bool:
    """Whether this PyTorch scales rows of 8-bit floats on a CPU, as 2.13 does; 2.11 has one scale per matrix."""
    eight = torch.ones(16, 16).to(FP8)
    try:
        torch._scaled_mm(eight, eight.T, scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.fixture(autouse=True)
def _product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, a stand-in multiplies; test_gpu_attention.py has the product itself on a GPU."""

    def scaled(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    if not rows_have_scales():
        monkeypatch.setattr(torch, "_scaled_mm", scaled)


def linear(sizes: Sequence[int] = (32, 16, 16), inputs: int = 48, *, bias: bool = False) -> Linear:
    numbers = torch.Generator().manual_seed(0)
    outputs = sum(sizes)
    return Linear(
        weight=torch.randn(outputs, inputs, generator=numbers).bfloat16(),
        bias=torch.randn(outputs, generator=numbers).bfloat16() if bias else None,
        names=tuple(f"layer.{at}" for at in range(len(sizes))),
        sizes=tuple(sizes),
    )


def inputs_like(of: Linear, rows: int = 5) -> Tensor:
    return torch.randn(rows, of.weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()


def test_a_matrix_takes_one_byte_per_element_and_keeps_three_bits_of_each() -> None:
    weight = linear().weight
    matrix = Fp8Matrix.of(weight)
    assert matrix.weight_OI.dtype is FP8
    assert matrix.weight_OI.untyped_storage().nbytes() == weight.numel()
    back = matrix.weight_OI.float() * matrix.scales_O[:, None]
    largest = weight.float().abs().amax(1, keepdim=True)
    # half of the last of three bits, and where those end the smallest step of a row's scale
    assert ((back - weight.float()).abs() <= weight.float().abs() / 16 + largest / 448 / 512).all()
    torch.testing.assert_close(back.abs().amax(1), largest[:, 0])


def test_products_are_off_by_a_few_per_cent() -> None:
    of = linear()
    x = inputs_like(of)
    got, wanted = Fp8Matrix.of(of.weight).linear(x), x.float() @ of.weight.float().T
    assert got.dtype is torch.bfloat16
    assert float((got.float() - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("factor", [2.0**-90, 2.0**-10, 2.0**13])
def test_the_size_of_numbers_does_not_matter(factor: float) -> None:
    of = linear()
    x = inputs_like(of)
    matrix = Fp8Matrix.of(of.weight)
    torch.testing.assert_close(matrix.linear(x * factor), matrix.linear(x) * factor, rtol=0, atol=0)


def test_rows_do_not_touch_each_other() -> None:
    of = linear()
    x = inputs_like(of)
    matrix = Fp8Matrix.of(of.weight)
    loud = x.clone()
    loud[0] *= 1000
    torch.testing.assert_close(matrix.linear(loud)[1:], matrix.linear(x)[1:], rtol=0, atol=0)


def test_a_row_of_zeros_gives_zeros() -> None:
    of = linear()
    assert Fp8Matrix.of(of.weight).linear(torch.zeros_like(inputs_like(of))).abs().max() == 0
    assert Fp8Matrix.of(torch.zeros(16, 16)).linear(torch.ones(2, 16)).abs().max() == 0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(number: float) -> None:
    of = linear()
    x = inputs_like(of)
    x[2, 7] = number
    is_nan = Fp8Matrix.of(of.weight).linear(x).isnan()
    assert is_nan[2].all()
    assert not is_nan[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("bias", [False, True])
def test_the_adapter_is_not_rounded_to_8_bits(bias: bool) -> None:
    of = linear(bias=bias)
    (adapter,) = create_adapters([of], rank=4, alpha=8, seed=0)
    x = inputs_like(of)
    projection = SampledFp8(of, rank=4)
    frozen = projection(x)
    plain = Fp8Matrix.of(of.weight).linear(x).float()
    torch.testing.assert_close(
        frozen.float(), plain + (of.bias.float() if of.bias is not None else 0), rtol=1e-2, atol=0.1
    )
    with torch.no_grad():
        for at, b in enumerate(adapter.parts_b):
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(at)))
    addresses = [projection._a.data_ptr(), projection._b.data_ptr()]
    projection.take(adapter)
    assert [projection._a.data_ptr(), projection._b.data_ptr()] == addresses
    with torch.no_grad():
        parts = [x.float() @ a.T @ b.T * adapter.scale for a, b in zip(adapter.parts_a, adapter.parts_b, strict=True)]
        wanted = torch.cat(parts, dim=1)
    gained = projection(x).float() - frozen.float()
    assert float((gained - wanted).norm() / wanted.norm()) < 2e-2


def test_sizes_that_the_product_does_not_take() -> None:
    assert takes_fp8(linear())
    assert not takes_fp8(linear((32, 8)))
    assert not takes_fp8(linear(inputs=40))


@pytest.mark.parametrize(("capability", "reason"), [((8, 6), "8.9, this GPU has 8.6"), ((7, 5), "7.5")])
def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert reason in str(fp8_refusal(torch.device("cuda", 0)))


def test_a_cpu_is_refused() -> None:
    assert "cpu" in str(fp8_refusal(CPU))


def test_a_wrong_rounding_is_found() -> None:
    assert rounding_for(CPU, torch.bfloat16, 48) is rounded
    assert list(rounding_faults(rounded, CPU, torch.bfloat16, 48)) == []

    def coarse(x: Tensor) -> tuple[Tensor, Tensor]:
        cells, scales = rounded(x)
        return (cells.float() / 64).round().mul(64).to(FP8), scales

    assert [fault.split(" off")[0] for fault in rounding_faults(coarse, CPU, torch.bfloat16, 48)] == [
        "numbers of 8 bits"
    ]
    (first, *_) = rounding_faults(lambda x: (rounded(x)[0], rounded(x)[1] * 1.1), CPU, torch.bfloat16, 48)
    assert first.startswith("scales off")
