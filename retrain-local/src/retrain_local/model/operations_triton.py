"""The operations between the matrix products of a layer on CUDA: one Triton kernel in each direction.

Only inputs are kept for the backward pass; norms and gates are computed again, in registers or for a product that reads
them. That moves a third of the bytes of PyTorch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain_local.devices.kernel_trials import dense, on_device_of
from retrain_local.model import operations
from retrain_local.model.operations import Heads, Operations, Turn

COLUMNS = 1024  # of the inner size that one program handles


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() != 2 or weight.dim() != 1:
        return operations.rms_norm(x, weight, eps)
    if not torch.is_grad_enabled():
        return add_norm(x, None, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


def split_heads(qkv_NHD: Tensor, turn: Turn) -> Heads:
    if not torch.is_grad_enabled():
        return _split(qkv_NHD, turn)
    heads: Heads = _SplitHeads.apply(qkv_NHD, turn)
    return heads


def swiglu(gate_up: Tensor) -> Tensor:
    if gate_up.dim() != 2:
        return operations.swiglu(gate_up)
    if not torch.is_grad_enabled():
        return _gated(gate_up)
    return _SwiGlu.apply(gate_up)


OPERATIONS = Operations(rms_norm=rms_norm, split_heads=split_heads, swiglu=swiglu)  # with and without gradients


def add_norm(x_ND: Tensor, added_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Compute `DecodeKernels.add_norm`: the sum is rounded, then the quotient, then its product with the weight."""
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    rows, size = x_ND.shape
    added = x_ND if added_ND is None else added_ND
    given, sizes = (x_ND, added, weight_D, y_ND), {"SIZE": size, "TILE": triton.next_power_of_2(size)}
    with on_device_of(x_ND):
        adds = added_ND is not None
        _add_norm[(rows,)](*given, x_ND.stride(0), added.stride(0), eps, **sizes, ADDS=adds, num_warps=8)
    return y_ND


def _split(qkv_NHD: Tensor, turn: Turn) -> Heads:
    rows, _, size = qkv_NHD.shape
    turned = turn.heads + turn.kv_heads
    qk = qkv_NHD.new_empty(rows, turned, size)
    given = qkv_NHD, turn.cos_N1P, turn.sin_N1P, qkv_NHD if turn.norm_HD is None else turn.norm_HD, qk
    strides = *qkv_NHD.stride()[:2], turn.cos_N1P.stride(0)
    sizes = {"HEADS": turned, "HALF": size // 2, "TILE": triton.next_power_of_2(size // 2)}
    with on_device_of(qkv_NHD):
        has_norm = turn.norm_HD is not None
        _turn_heads[(rows, turned)](*given, *strides, turn.eps, **sizes, HAS_NORM=has_norm, num_warps=1)
    queries_NHD, keys_NKD = qk.split((turn.heads, turn.kv_heads), dim=1)
    return queries_NHD, keys_NKD, qkv_NHD[:, turned:]


def _gated(gate_up: Tensor) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, inner)
    grid = rows, triton.cdiv(inner, COLUMNS)
    with on_device_of(gate_up):
        _swiglu[grid](gate_up, y, gate_up.stride(0), INNER=inner, TILE=COLUMNS, num_warps=4)
    return y


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """Computes `operations._RmsNorm`; the backward pass computes r again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return add_norm(x, None, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x, weight), g = ctx.saved_tensors, dense(gradients[0])
        into = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, size = x.shape
        tile = triton.next_power_of_2(size)
        with on_device_of(x):
            _rms_norm_back[(rows,)](
                x, weight, g, into, x.stride(0), g.stride(0), ctx.eps, SIZE=size, TILE=tile, num_warps=8
            )
        return into, None, None

    @staticmethod
    def again(ctx: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        return add_norm(x, None, weight, ctx.eps)


class _SplitHeads(torch.autograd.Function):  # type: ignore[misc]
    """Computes `operations._SplitHeads`; without norms of the heads only angles are kept."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Turn) -> Heads:
        ctx.turn, ctx.size = turn, qkv.shape
        ctx.save_for_backward(*([] if turn.norm_HD is None else [qkv]))
        return _split(qkv, turn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        turn: Turn = ctx.turn
        rows, heads, size = ctx.size
        of_queries, of_keys, of_values = (dense(g) for g in gradients)
        into = of_queries.new_empty(ctx.size)
        (qkv,) = ctx.saved_tensors or (of_queries,)
        strides = [stride for g in (of_queries, of_keys, of_values, qkv) for stride in g.stride()[:2]]
        given = of_queries, of_keys, of_values, qkv, turn.cos_N1P, turn.sin_N1P
        norm, strides = qkv if turn.norm_HD is None else turn.norm_HD, [*strides, turn.cos_N1P.stride(0)]
        sizes = {"QUERIES": turn.heads, "KEYS": turn.kv_heads, "HALF": size // 2, "HAS_NORM": turn.norm_HD is not None}
        with on_device_of(into):
            tile = triton.next_power_of_2(size // 2)
            _turn_heads_back[(rows, heads)](*given, norm, into, *strides, turn.eps, **sizes, TILE=tile, num_warps=1)
        return into, None


class _SwiGlu(torch.autograd.Function):  # type: ignore[misc]
    """Computes `operations._SwiGlu`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,), g = ctx.saved_tensors, dense(gradients[0])
        into = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        rows, inner = g.shape
        with on_device_of(g):
            _swiglu_back[(rows, triton.cdiv(inner, COLUMNS))](
                gate_up, g, into, gate_up.stride(0), g.stride(0), INNER=inner, TILE=COLUMNS, num_warps=4
            )
        return into

    @staticmethod
    def again(ctx: Any) -> Tensor:
        return _gated(*ctx.saved_tensors)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, added, weight, y, x_row, added_row, eps, SIZE: tl.constexpr, TILE: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < SIZE
    total = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    # In 16 bits: the compiler drops a rounding between two conversions.
    if ADDS:
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


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_back(  # type: ignore[no-untyped-def]
    x, weight, g, into, x_row, g_row, eps, SIZE: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < SIZE
    wide = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(g + row * g_row + at, mask=inside, other=0.0).to(tl.float32)
    scaled = scaled * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    along = tl.sum(scaled * wide, 0) / SIZE * r * r
    tl.store(into + row * SIZE + at, ((scaled - wide * along) * r).to(into.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_heads_back(  # type: ignore[no-untyped-def]
    of_queries,
    of_keys,
    of_values,
    qkv,
    cos,
    sin,
    norm,
    into,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    qkv_row,
    qkv_head,
    angle_row,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, TILE)
    inside = at < HALF
    target = into + (row * (QUERIES + 2 * KEYS) + head) * (2 * HALF) + at
    if head < QUERIES:
        source = of_queries + row * query_row + head * query_head + at
    elif head < QUERIES + KEYS:
        source = of_keys + row * key_row + (head - QUERIES) * key_head + at
    else:
        source = of_values + row * value_row + (head - QUERIES - KEYS) * value_head + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < QUERIES + KEYS:
        c = tl.load(cos + row * angle_row + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + row * angle_row + at, mask=inside, other=0.0).to(tl.float32)
        back = first * c + second * s
        second = second * c - first * s
        first = back
        if HAS_NORM:
            w = norm + head * (2 * HALF) + at
            first = first * tl.load(w, mask=inside, other=0.0).to(tl.float32)
            second = second * tl.load(w + HALF, mask=inside, other=0.0).to(tl.float32)
            x = qkv + row * qkv_row + head * qkv_head + at
            x_first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
            x_second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(x_first * x_first, 0) + tl.sum(x_second * x_second, 0)) / (2 * HALF) + eps)
            along = (tl.sum(first * x_first, 0) + tl.sum(second * x_second, 0)) / (2 * HALF) * r * r
            first = (first - x_first * along) * r
            second = (second - x_second * along) * r
    tl.store(target, first.to(into.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(into.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_back(  # type: ignore[no-untyped-def]
    gate_up, g, into, row_stride, g_row, INNER: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < INNER
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + INNER + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(g + row * g_row + at, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    of_gate = given * up * open_ * (1.0 + gate * (1.0 - open_))
    target = into + row * (2 * INNER) + at
    tl.store(target, of_gate.to(into.dtype.element_ty), mask=inside)
    tl.store(target + INNER, (given * gate * open_).to(into.dtype.element_ty), mask=inside)
