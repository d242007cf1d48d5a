"""The fused kernels, on a GPU if there is one, otherwise in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from retrain_local.decoder import Shape
from retrain_local.model.fused import faults
from retrain_local.model.operations import Operations, Turn
from tests.triton_interpreter import HAS_CUDA, elsewhere, kernels_run, needs_triton, run_interpreted

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_CUDA else [])]


@needs_triton
@elsewhere
@pytest.mark.long  # the interpreter takes its time; `nox -s proofs` installs triton
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


def make() -> Operations:
    from retrain_local.model.operations_triton import triton_operations

    return triton_operations()


def shape(heads: int, kv_heads: int, size: int, hidden: int, inner: int) -> Shape:
    sizes = {"layers": 1, "vocabulary": 1, "context": None, "parameters": 1}
    return Shape(heads=heads, kv_heads=kv_heads, head_size=size, value_size=size, hidden=hidden, inner=inner, **sizes)


@kernels_run
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [shape(4, 2, 32, 128, 384), shape(3, 1, 80, 240, 1500), shape(2, 2, 128, 2560, 1024)])
def test_they_compute_what_pytorch_does(of: Shape, dtype: torch.dtype) -> None:
    assert list(faults(make(), DEVICE, dtype, of)) == []


@kernels_run
def test_rows_may_be_views() -> None:
    x = torch.randn(4, 96, device=DEVICE)[:, :64]
    weight = torch.randn(64, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(make().rms_norm(x, weight, 1e-6), Operations().rms_norm(x, weight, 1e-6))
        torch.testing.assert_close(make().swiglu(x), Operations().swiglu(x))


@kernels_run
def test_a_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 64, device=DEVICE)
    x[1, 5] = torch.nan
    with torch.no_grad():
        normed = make().rms_norm(x, torch.ones(64, device=DEVICE), 1e-6)
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


@kernels_run
def test_what_is_differentiated_is_left_to_pytorch() -> None:
    x = torch.randn(3, 64, device=DEVICE, requires_grad=True)
    cos = torch.ones(3, 1, 8, device=DEVICE)
    turn = Turn(heads=2, kv_heads=1, cos_N1P=cos, sin_N1P=cos, norm_HD=None, eps=1e-6)
    queries, keys, values = make().split_heads(x.view(3, 4, 16), turn)
    total = make().rms_norm(x, x.detach()[0], 1e-6).sum() + make().swiglu(x).sum() + (queries.sum() + keys.sum())
    (gradient,) = torch.autograd.grad(total + values.sum(), x)
    assert gradient.abs().min() > 0
