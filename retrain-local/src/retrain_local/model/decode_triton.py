"""`DecodeKernels` and `Gates` in Triton: the adapter's second product, of few columns, is made where it is added."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrain_local.decoder import Target
from retrain_local.devices.kernel_trials import dense, on_device_of
from retrain_local.model.fused import DecodeKernels
from retrain_local.model.operations import Turn
from retrain_local.model.operations_triton import add_norm
from retrain_local.model.projection import Gates, LowRankSum

# A tensor core multiplies 16 rows at least. Of more rows 32 share a tile of B.
TILE_ROWS = 16, 32
TILE_RANKS = 16, 32
TILE_COLUMNS = 64


def heads(product: LowRankSum, turn: Turn, target: Target) -> Tensor:
    y, inner, b = product.y_NO, product.inner_NR, product.b_OR
    rows, rank, half = len(y), b.shape[1], turn.cos_N1P.shape[-1]
    queries_NHD = y.new_empty(rows, turn.heads, 2 * half)
    tile_rows = TILE_ROWS[rows > TILE_ROWS[0]]
    cells = target.keys_SKD, target.values_SKD
    angles, norm = (turn.cos_N1P, turn.sin_N1P), y if turn.norm_HD is None else turn.norm_HD
    strides = y.stride(0), inner.stride(0), turn.cos_N1P.stride(0), *(s for each in cells for s in each.stride()[:2])
    sizes = {"HEADS": turn.heads, "KV_HEADS": turn.kv_heads, "HALF": half, "RANK": rank}
    tiles = {"TILE_ROWS": tile_rows, "TILE": max(16, triton.next_power_of_2(half))}
    tiles["TILE_RANK"] = TILE_RANKS[rank > TILE_RANKS[0]]
    with on_device_of(y):
        given = y, inner, b, *angles, norm, queries_NHD, *cells, target.slots_B, *strides, turn.eps, rows
        grid = triton.cdiv(rows, tile_rows), turn.heads + 2 * turn.kv_heads
        _heads[grid](*given, **sizes, **tiles, HAS_NORM=turn.norm_HD is not None, num_warps=4)
    return queries_NHD


def swiglu(product: LowRankSum) -> Tensor:
    y, inner, b = product.y_NO, product.inner_NR, product.b_OR
    (rows, outputs), rank = y.shape, b.shape[1]
    gated = y.new_empty(rows, outputs // 2)
    tile_rows = TILE_ROWS[rows > TILE_ROWS[0]]
    grid = triton.cdiv(rows, tile_rows), triton.cdiv(outputs // 2, TILE_COLUMNS)
    given = y, inner, b, gated, y.stride(0), inner.stride(0), rows
    tiles = {"TILE_ROWS": tile_rows, "TILE": TILE_COLUMNS, "TILE_RANK": TILE_RANKS[rank > TILE_RANKS[0]]}
    with on_device_of(y):
        _swiglu[grid](*given, INNER=outputs // 2, RANK=rank, **tiles, num_warps=4)
    return gated


def swiglu_back(product: LowRankSum, g: Tensor) -> Tensor:
    y, inner, b, g = product.y_NO, product.inner_NR, product.b_OR, dense(g)
    (rows, outputs), rank = y.shape, b.shape[1]
    into = y.new_empty(rows, outputs)
    grid = triton.cdiv(rows, TILE_ROWS[1]), triton.cdiv(outputs // 2, TILE_COLUMNS)
    tiles = {"TILE_ROWS": TILE_ROWS[1], "TILE": TILE_COLUMNS, "TILE_RANK": TILE_RANKS[rank > TILE_RANKS[0]]}
    with on_device_of(y):
        given = y, inner, b, g, into, y.stride(0), inner.stride(0), g.stride(0), rows
        _gates_back[grid](*given, INNER=outputs // 2, RANK=rank, **tiles, num_warps=4)
    return into


KERNELS = DecodeKernels(add_norm=add_norm, heads=heads, swiglu=swiglu)  # without gradients
GATES = Gates(forward=swiglu, backward=swiglu_back)


@triton.jit  # type: ignore[untyped-decorator]
def _completed(  # type: ignore[no-untyped-def]
    y, inner, b, rows, columns, y_row, inner_row, part, is_row, is_column, RANK: tl.constexpr, TILE_RANK: tl.constexpr
):
    # a tile of y + inner b^T in fp32, for the columns of one part
    tile = tl.load(
        y + rows[:, None] * y_row + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
    ).to(tl.float32)
    for first in range(0, RANK, TILE_RANK):
        ranks = first + tl.arange(0, TILE_RANK)
        is_rank = ranks < RANK
        t = tl.load(
            inner + rows[:, None] * inner_row + part * RANK + ranks[None, :],
            mask=is_row[:, None] & is_rank[None, :],
            other=0.0,
        )
        own = tl.load(
            b + columns[:, None] * RANK + ranks[None, :], mask=is_column[:, None] & is_rank[None, :], other=0.0
        )
        tile = tl.dot(t, tl.trans(own), acc=tile, input_precision="ieee")
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _heads(  # type: ignore[no-untyped-def]
    y,
    inner,
    b,
    cos,
    sin,
    norm,
    queries,
    keys,
    values,
    slots,
    y_row,
    inner_row,
    angle_row,
    key_slot,
    key_head,
    value_slot,
    value_head,
    eps,
    num_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_RANK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    head = tl.program_id(1)
    at = tl.arange(0, TILE)
    is_row = rows < num_rows
    is_column = at < HALF
    is_cell = is_row[:, None] & is_column[None, :]
    part = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    columns = head * (2 * HALF) + at
    first = _completed(y, inner, b, rows, columns, y_row, inner_row, part, is_row, is_column, RANK, TILE_RANK)
    second = _completed(y, inner, b, rows, columns + HALF, y_row, inner_row, part, is_row, is_column, RANK, TILE_RANK)
    slot = tl.load(slots + rows, mask=is_row, other=0).to(tl.int64)
    number = queries.dtype.element_ty
    if head >= HEADS + KV_HEADS:
        target = values + (slot * value_slot + (head - HEADS - KV_HEADS) * value_head)[:, None] + at[None, :]
        tl.store(target, first.to(number), mask=is_cell)
        tl.store(target + HALF, second.to(number), mask=is_cell)
    else:
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            first_w = tl.load(norm + columns, mask=is_column, other=0.0)[None, :]
            second_w = tl.load(norm + columns + HALF, mask=is_column, other=0.0)[None, :]
            first = ((first * scale).to(number) * first_w).to(tl.float32)
            second = ((second * scale).to(number) * second_w).to(tl.float32)
        angles = rows[:, None] * angle_row + at[None, :]
        c = tl.load(cos + angles, mask=is_cell, other=0.0).to(tl.float32)
        s = tl.load(sin + angles, mask=is_cell, other=0.0).to(tl.float32)
        turned = (first * c - second * s).to(number)
        other = (second * c + first * s).to(number)
        if head < HEADS:
            target = queries + (rows * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
            tl.store(target, turned, mask=is_cell)
            tl.store(target + HALF, other, mask=is_cell)
        else:
            target = keys + (slot * key_slot + (head - HEADS) * key_head)[:, None] + at[None, :]
            tl.store(target, turned, mask=is_cell)
            tl.store(target + HALF, other, mask=is_cell)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_and_up(  # type: ignore[no-untyped-def]
    y,
    inner,
    b,
    y_row,
    inner_row,
    num_rows,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_RANK: tl.constexpr,
):
    # the rows and columns of this program, and the completed tiles of both halves there
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row = rows < num_rows
    is_column = at < INNER
    gate = _completed(y, inner, b, rows, at, y_row, inner_row, 0, is_row, is_column, RANK, TILE_RANK)
    up = _completed(y, inner, b, rows, at + INNER, y_row, inner_row, 1, is_row, is_column, RANK, TILE_RANK)
    return rows, at, is_row[:, None] & is_column[None, :], gate, up


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(  # type: ignore[no-untyped-def]
    y,
    inner,
    b,
    gated,
    y_row,
    inner_row,
    num_rows,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_RANK: tl.constexpr,
):
    rows, at, is_cell, gate, up = _gate_and_up(
        y, inner, b, y_row, inner_row, num_rows, INNER, RANK, TILE_ROWS, TILE, TILE_RANK
    )
    number = gated.dtype.element_ty
    out = (gate * tl.sigmoid(gate)).to(number) * up.to(number)
    tl.store(gated + rows[:, None] * INNER + at[None, :], out, mask=is_cell)


@triton.jit  # type: ignore[untyped-decorator]
def _gates_back(  # type: ignore[no-untyped-def]
    y,
    inner,
    b,
    g,
    into,
    y_row,
    inner_row,
    g_row,
    num_rows,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_RANK: tl.constexpr,
):
    rows, at, is_cell, gate, up = _gate_and_up(
        y, inner, b, y_row, inner_row, num_rows, INNER, RANK, TILE_ROWS, TILE, TILE_RANK
    )
    given = tl.load(g + rows[:, None] * g_row + at[None, :], mask=is_cell, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    target = into + rows[:, None] * (2 * INNER) + at[None, :]
    of_gate = given * up * open_ * (1.0 + gate * (1.0 - open_))
    tl.store(target, of_gate.to(into.dtype.element_ty), mask=is_cell)
    tl.store(target + INNER, (given * gate * open_).to(into.dtype.element_ty), mask=is_cell)
