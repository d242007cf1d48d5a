"""The fused kernels, on a GPU if there is one, otherwise in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from retrain_local.decoder import Shape
from retrain_local.model.fused import decode_faults, faults
from retrain_local.model.operations import Operations, Turn
from tests.kit.triton_interpreter import HAS_CUDA, elsewhere, kernels_run, needs_triton, run_interpreted

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_CUDA else [])]


@needs_triton
@elsewhere
@pytest.mark.long  # the interpreter takes its time; `nox -s proofs` installs triton
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


def make() -> Operations:
    from retrain_local.model.operations_triton import OPERATIONS

    return OPERATIONS


def shape(heads: int, kv_heads: int, size: int, hidden: int, inner: int) -> Shape:
    sizes = {"layers": 1, "vocabulary": 1, "context": None, "parameters": 1}
    return Shape(heads=heads, kv_heads=kv_heads, head_size=size, value_size=size, hidden=hidden, inner=inner, **sizes)


@kernels_run
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [shape(4, 2, 32, 128, 384), shape(3, 1, 80, 240, 1500), shape(2, 2, 128, 2560, 1024)])
def test_they_compute_what_pytorch_does(of: Shape, dtype: torch.dtype) -> None:
    assert list(faults(make(), DEVICE, dtype, of)) == []


@kernels_run
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("of", "rank"), [(shape(4, 2, 32, 128, 384), 4), (shape(3, 1, 80, 240, 150), 32), (shape(2, 2, 128, 640, 64), 70)]
)
def test_decoding_kernels_compute_what_their_definitions_do(of: Shape, rank: int, dtype: torch.dtype) -> None:
    from retrain_local.model.decode_triton import KERNELS

    assert list(decode_faults(KERNELS, DEVICE, dtype, of, rank)) == []


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
@pytest.mark.parametrize("has_norm", [False, True])
def test_gradients_may_be_views_and_one_may_be_missing(has_norm: bool) -> None:
    """Attention gives gradients as it likes: parts of a larger tensor, heads before tokens, none of the keys."""
    found = []
    for do in (make(), Operations()):
        torch.manual_seed(0)
        whole = torch.randn(5, 96, device=DEVICE, requires_grad=True)
        x = whole[:, :64]
        angles = torch.randn(5, 1, 8, device=DEVICE)
        norm = torch.randn(3, 16, device=DEVICE) if has_norm else None
        turn = Turn(heads=2, kv_heads=1, cos_N1P=angles.cos(), sin_N1P=angles.sin(), norm_HD=norm, eps=1e-6)
        queries, _, values = do.split_heads(x.unflatten(1, (4, 16)), turn)
        weights = torch.randn(2, 5, 16, device=DEVICE).transpose(0, 1)
        total = (queries * weights).sum() + (values.expand(5, 3, 16) * torch.randn(5, 3, 16, device=DEVICE)).sum()
        total = total + (do.swiglu(do.rms_norm(x, torch.randn(64, device=DEVICE), 1e-6)) ** 2).sum()
        found.append(torch.autograd.grad(total, whole)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@kernels_run
def test_a_gradient_that_is_not_a_number_stays_in_its_row() -> None:
    x = torch.randn(3, 64, device=DEVICE, requires_grad=True)
    weights = torch.ones(3, 64, device=DEVICE)
    weights[1, 5] = torch.nan
    normed = make().rms_norm(x, torch.ones(64, device=DEVICE), 1e-6)
    (gradient,) = torch.autograd.grad(normed, x, weights)
    assert gradient[1].isnan().all()
    assert gradient[[0, 2]].isfinite().all()
