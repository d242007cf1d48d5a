"""The fused kernels, on a GPU if there is one, otherwise in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from retrain.api import SamplingParams
from retrain_local.memory import sizes
from retrain_local.model.fused import decode_faults, faults
from retrain_local.model.operations import Operations, Turn
from retrain_local.model.pair import Placement
from tests.kit.local_backend import Local
from tests.kit.local_engines import all_same, make_engine, paged
from tests.kit.local_pairs import shake
from tests.kit.shapes import shape
from tests.kit.triton_interpreter import (
    DEVICE,
    DTYPES,
    INTERPRETER,
    in_the_interpreter,
    kernels_run,
    run_interpreted,
)


@in_the_interpreter
@pytest.mark.long  # it takes its time; `nox -s proofs` installs triton
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


def make() -> Operations:
    from retrain_local.model.operations_triton import OPERATIONS

    return OPERATIONS


@kernels_run
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "hidden", "inner"), [((4, 2, 32), 128, 384), ((3, 1, 80), 240, 1500), ((2, 2, 128), 2560, 1024)]
)
def test_kernels_compute_the_same(heads: tuple[int, int, int], hidden: int, inner: int, dtype: torch.dtype) -> None:
    assert list(faults(make(), DEVICE, dtype, shape(*heads, hidden=hidden, inner=inner))) == []


@kernels_run
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "hidden", "inner", "rank"),
    [((4, 2, 32), 128, 384, 4), ((3, 1, 80), 240, 150, 32), ((2, 2, 128), 640, 64, 70)],
)
def test_decoding_kernels(heads: tuple[int, int, int], hidden: int, inner: int, rank: int, dtype: torch.dtype) -> None:
    from retrain_local.model.decode_triton import KERNELS

    of = shape(*heads, hidden=hidden, inner=inner)
    assert list(decode_faults(KERNELS, DEVICE, dtype, of, rank)) == []


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_product_reads_is_made_again_bit_by_bit(dtype: torch.dtype) -> None:
    do, found, is_kept = make(), [], []
    for spares in (lambda _: nullcontext(), do.spares):
        torch.manual_seed(0)
        sizes = (5, 8), (8,), (12, 8), (4, 6)
        x, weight, up, down = (torch.randn(size, device=DEVICE).to(dtype) for size in sizes)
        trained = [each.requires_grad_() for each in (x, up, down)]
        normed = do.rms_norm(x, weight, 1e-6)
        with spares(normed):
            gate_up = functional.linear(normed, up)
        inner = do.swiglu(gate_up)
        with spares(inner):
            y = functional.linear(inner, down)
        watched = [weakref.ref(normed), weakref.ref(inner)]
        del normed, inner
        is_kept.append([each() is not None for each in watched])
        found.append(torch.autograd.grad((y.float() ** 2).sum(), trained))
    assert is_kept == [[True, True], [False, False]]
    assert all(map(torch.equal, *found))


@kernels_run
def test_what_is_not_a_number_stays_in_its_row() -> None:
    ones = torch.ones(3, 64, device=DEVICE)
    spoilt = ones.clone()
    spoilt[1, 5] = torch.nan
    x = torch.randn(3, 64, device=DEVICE, requires_grad=True)
    normed = make().rms_norm(x, ones[0], 1e-6)
    (gradient,) = torch.autograd.grad(normed, x, spoilt)
    for found in (gradient, make().rms_norm(x.detach() * spoilt, ones[0], 1e-6)):
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


CPU = torch.device("cpu")


@pytest.mark.skipif(os.environ.get(INTERPRETER) != "1", reason="test_gpu.py has engines on CUDA")
def test_an_engine_on_kernels_alone(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrain_local.attention.paged_triton import TritonPages
    from retrain_local.model.decode_triton import KERNELS
    from retrain_local.sampling import draw_triton

    monkeypatch.setattr(sizes, "MERGE_LIMIT", 0)
    monkeypatch.setattr(Placement, "is_stacked", property(lambda _: True))
    pair = local.pair(seed=1)
    shake(pair, 0.1)
    pair.publish()

    params = SamplingParams(max_tokens=6, temperature=0.8, entropy=True)
    wanted = make_engine(pair.sampler, kernels=paged()).sample(local.requests[:2], params)
    sampler: Any = pair.sampler
    sampler._decode = KERNELS
    engine = make_engine(sampler, kernels=paged(TritonPages(20)))
    engine._draw = draw_triton.draw_tokens
    all_same(engine.sample(local.requests[:2], params), wanted)
