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
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, size = x.shape
    with on_device_of(x):
        _rms_norm[(rows,)](x, weight, y, x.stride(0), eps, SIZE=size, TILE=triton.next_power_of_2(size), num_warps=8)
    return y


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
def _rms_norm(x, weight, y, x_row, eps, SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < SIZE
    wide = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
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


TILE = 4096  # numbers of a row at a time; a wider row is read a second time, out of the cache


def rounded(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = x_NI.shape
    stored_NI = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scales_N1 = torch.empty(rows, 1, dtype=torch.float32, device=x_NI.device)
    x_NI = x_NI if x_NI.stride(-1) == 1 else x_NI.contiguous()
    with on_device_of(x_NI):
        _round[(rows,)](
            x_NI,
            stored_NI,
            scales_N1,
            x_NI.stride(0),
            SIZE=size,
            TILE=min(TILE, triton.next_power_of_2(size)),
            num_warps=4,
        )
    return stored_NI, scales_N1


@triton.jit  # type: ignore[untyped-decorator]
def _round(x, stored, scales, x_row, SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    largest, unseen = 0.0, 0.0  # the largest of numbers need not see a NaN, and so `unseen` has to
    for first in range(0, SIZE, TILE):
        at = first + tl.arange(0, TILE)
        wide = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(wide), 0))
        unseen += tl.sum(wide * 0.0, 0)
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    for first in range(0, SIZE, TILE):
        at = first + tl.arange(0, TILE)
        wide = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
        cells = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -448.0), 448.0)
        tl.store(stored + row * SIZE + at, cells.to(stored.dtype.element_ty), mask=at < SIZE)
    tl.store(scales + row, scale + unseen)
