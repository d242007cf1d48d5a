"""The operations between the matrix products of a layer as one Triton kernel each, without gradients.

`training_triton` has them with gradients, and what is used where.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain_local.attention.paged_triton import on_device_of
from retrain_local.model.operations import Heads, Turn

COLUMNS = 1024  # of the inner size that one program handles


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `operations.rms_norm`; x [N, I], one weight for all rows."""
    return add_norm(x, None, weight, eps)


def add_norm(x_ND: Tensor, added_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """See `DecodeKernels`; the sum is rounded, then the quotient, then its product with the weight."""
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    rows, size = x_ND.shape
    added = x_ND if added_ND is None else added_ND
    with on_device_of(x_ND):
        _add_norm[(rows,)](
            x_ND,
            added,
            weight_D,
            y_ND,
            x_ND.stride(0),
            added.stride(0),
            eps,
            SIZE=size,
            TILE=triton.next_power_of_2(size),
            ADDS=added_ND is not None,
            num_warps=8,
        )
    return y_ND


def split_heads(qkv_NHD: Tensor, turn: Turn) -> Heads:
    rows, _, size = qkv_NHD.shape
    turned = turn.heads + turn.kv_heads
    qk = qkv_NHD.new_empty(rows, turned, size)
    with on_device_of(qkv_NHD):
        _turn_heads[(rows, turned)](
            qkv_NHD,
            turn.cos_N1P,
            turn.sin_N1P,
            qkv_NHD if turn.norm_HD is None else turn.norm_HD,
            qk,
            qkv_NHD.stride(0),
            qkv_NHD.stride(1),
            turn.cos_N1P.stride(0),
            turn.eps,
            HEADS=turned,
            HALF=size // 2,
            TILE=triton.next_power_of_2(size // 2),
            HAS_NORM=turn.norm_HD is not None,
            num_warps=1,
        )
    queries_NHD, keys_NKD = qk.split((turn.heads, turn.kv_heads), dim=1)
    return queries_NHD, keys_NKD, qkv_NHD[:, turned:]


def swiglu(gate_up: Tensor) -> Tensor:
    """See `operations.swiglu`; [N, 2 I]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, inner)
    grid = rows, triton.cdiv(inner, COLUMNS)
    with on_device_of(gate_up):
        _swiglu[grid](gate_up, y, gate_up.stride(0), INNER=inner, TILE=COLUMNS, num_warps=4)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, added, weight, y, x_row, added_row, eps, SIZE: tl.constexpr, TILE: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < SIZE
    total = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    if ADDS:  # in 16 bits: the compiler drops a rounding between two conversions
        total += tl.load(added + row * added_row + at, mask=inside, other=0.0)
        tl.store(x + row * x_row + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    # Rounded before the product with the weight, as the trainer does. The product is in 16 bits as well: with both
    # widened to fp32, the compiler would drop the rounding as a cast to and fro.
    normed = (wide * scale).to(y.dtype.element_ty)
    tl.store(y + row * SIZE + at, normed * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_heads(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    norm,
    out,
    qkv_row,
    qkv_head,
    angle_row,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, TILE)
    inside = at < HALF
    source = qkv + row * qkv_row + head * qkv_head + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        w = norm + head * (2 * HALF) + at
        first = ((first * scale).to(out.dtype.element_ty) * tl.load(w, mask=inside, other=0.0)).to(tl.float32)
        second = ((second * scale).to(out.dtype.element_ty) * tl.load(w + HALF, mask=inside, other=0.0)).to(tl.float32)
    c = tl.load(cos + row * angle_row + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_row + at, mask=inside, other=0.0).to(tl.float32)
    target = out + (row * HEADS + head) * (2 * HALF) + at
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(gate_up, y, row_stride, INNER: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < INNER
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + INNER + at, mask=inside, other=0.0)
    tl.store(y + row * INNER + at, (gate * tl.sigmoid(gate)).to(y.dtype.element_ty) * up, mask=inside)
