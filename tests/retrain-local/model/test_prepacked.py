"""Matrices in oneDNN's layout: the same product, and a plain one wherever that layout is missing or not worth it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from retrain_local.memory.sizes import PREPACK_FROM
from retrain_local.model import projection as prepacked
from retrain_local.model.projection import Plain, Prepacked, can_prepack, frozen_matrix, own_matrix

INPUTS = 512
LARGE, SMALL = PREPACK_FROM // INPUTS, PREPACK_FROM // INPUTS - 1  # outputs
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    can_prepack.cache_clear()
    yield
    can_prepack.cache_clear()


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 32, 200])
def test_the_product_is_the_same_for_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = drawn(LARGE, INPUTS, dtype=dtype), drawn(LARGE, dtype=dtype), drawn(rows, INPUTS, dtype=dtype)
    wanted = x.double() @ weight.double().T
    tolerance = (1e-6 if dtype == torch.float32 else 4e-3) * float(wanted.norm())
    with torch.inference_mode():
        for matrix in (frozen_matrix(weight), own_matrix(weight)):
            found = matrix.linear(x), matrix.linear(x, bias) - bias
            assert all(y.dtype == dtype for y in found)
            assert all(float((y.double() - wanted).norm()) < 2 * tolerance for y in found)


@pytest.mark.skipif(not can_prepack(torch.float32), reason="PyTorch has no prepacked product here")
def test_only_large_matrices_are_prepacked() -> None:
    assert isinstance(frozen_matrix(drawn(LARGE, INPUTS)), Prepacked)
    assert isinstance(own_matrix(drawn(LARGE, INPUTS)), Prepacked)
    for plain in (
        frozen_matrix(drawn(SMALL, INPUTS)),
        frozen_matrix(drawn(LARGE, INPUTS), may_copy=False),
        frozen_matrix(drawn(LARGE, INPUTS, dtype=torch.float64)),
        frozen_matrix(torch.empty(LARGE, INPUTS, device="meta")),
    ):
        assert isinstance(plain, Plain)


@pytest.mark.parametrize("outputs", [SMALL, LARGE])
def test_taking_other_numbers_leaves_the_tensor_alone(outputs: int) -> None:
    weight, other, x = drawn(outputs, INPUTS), 2 * drawn(outputs, INPUTS), drawn(5, INPUTS)
    kept, matrix = weight.clone(), own_matrix(weight)
    before = matrix.linear(x)
    matrix.take(other)
    assert torch.equal(weight, kept)
    torch.testing.assert_close(matrix.linear(x), 2 * before, rtol=1e-4, atol=1e-3)
    other.zero_()
    assert float(matrix.linear(x).abs().max()) > 1.0  # it does not follow the tensor that it took


def broken(*_: object) -> Tensor:
    raise NotImplementedError("no kernel here")


def wrong(x: Tensor, *_: object) -> Tensor:
    return torch.zeros(len(x), 48)


@pytest.mark.parametrize("product", [broken, wrong])
def test_a_product_that_fails_or_is_wrong_is_not_used(product: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    assert not can_prepack(torch.float32)
    weight = drawn(LARGE, INPUTS)
    matrix = frozen_matrix(weight)
    assert isinstance(matrix, Plain)
    assert torch.equal(matrix.linear(weight[:2]), torch.nn.functional.linear(weight[:2], weight))


def test_it_is_used_on_the_processors_it_was_measured_on_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked.platform, "machine", lambda: "arm64")
    assert not can_prepack(torch.float32)
