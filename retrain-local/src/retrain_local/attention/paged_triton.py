"""Triton over pages of keys and values: reads for one new token per row, and writes. Imported only for CUDA.

A read is flash decoding: every program handles one row, one key head with all its query heads, and one stretch of the
row's keys; a second kernel joins the stretches. Keys that rows share may be read first, for all of these rows at once;
the first stretch of each row continues from there. Lengths and block tables are read on the device and the grid
depends on the number of rows only, so that a captured CUDA graph stays right while rows grow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain_local.attention.pages import (
    LARGEST,
    SHARED_STRETCHES,
    PagedKernels,
    Pages,
    Prefixes,
    key_stretches,
    shared_heads,
)
from retrain_local.decoder import Scores
from retrain_local.devices.kernel_trials import dense, on_device_of

TILE_HEADS = 16  # the least number of rows that a tensor core multiplies
TILE_BYTES = 2**14  # of keys, as much of values, loaded while those before are worked on
PROGRAMS_PER_SM = 8


class TritonPages(PagedKernels):
    """The kernels of one device, whose number of multiprocessors decides into how many stretches keys are cut."""

    def __init__(self, multiprocessors: int) -> None:
        self._programs = PROGRAMS_PER_SM * multiprocessors

    def read(
        self,
        queries_BHD: Tensor,
        pages: Pages,
        tables_BM: Tensor,
        lengths_B: Tensor,
        scores: Scores,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        keys, values = pages.keys, pages.values
        rows, heads, size = queries_BHD.shape
        block_size, kv_heads, value_size = values.shape[1:]
        max_keys = tables_BM.shape[1] * block_size
        splits = key_stretches(self._programs, rows * kv_heads, max_keys)
        queries_BHD = dense(queries_BHD)
        out_BHD = queries_BHD.new_empty(rows, heads, value_size)
        parts, sums = _states(out_BHD, splits) if splits > 1 else (out_BHD, out_BHD)
        shared = None if prefixes is None or scores.window else _states(out_BHD, SHARED_STRETCHES)
        tokens_B, rows_B = (lengths_B,) * 2 if prefixes is None else (prefixes.tokens_B, prefixes.rows_B)
        sinks = queries_BHD if scores.sinks_H is None else scores.sinks_H
        strides = *queries_BHD.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables_BM.stride(0)
        numbers = float(scores.scale), float(scores.softcap or 0.0), scores.window or 0, *strides, max_keys
        sizes = _sizes(heads // kv_heads, size, value_size, keys.element_size())
        sizes |= {"HEADS": heads, "BLOCK_SIZE": block_size, "SHARED": SHARED_STRETCHES}
        sizes |= {"HAS_WINDOW": scores.window is not None, "HAS_SOFTCAP": scores.softcap is not None}
        sizes |= {"HAS_SINKS": scores.sinks_H is not None, "IS_QUANTISED": pages.key_scales is not None}
        with on_device_of(queries_BHD):
            given = queries_BHD, *_tensors(pages), tables_BM, lengths_B, sinks, tokens_B, rows_B
            if shared is not None:
                first = sizes | {"TILE_HEADS": shared_heads(value_size), "SPLITS": SHARED_STRETCHES, "HAS_SINKS": False}
                first |= {"IS_SHARED": True, "HAS_SHARED": False}
                grid = rows, kv_heads, SHARED_STRETCHES
                attend[grid](*given, *shared, *shared, *numbers, **first, num_warps=4, num_stages=2)
            sizes |= {"IS_SHARED": False, "HAS_SHARED": shared is not None, "SPLITS": splits}
            before = shared or (parts, sums)
            # three stages: table, keys and values are all loaded ahead
            attend[(rows, kv_heads, splits)](*given, *before, parts, sums, *numbers, **sizes, num_warps=4, num_stages=3)
            if splits > 1:
                tile = triton.next_power_of_2(value_size)
                join[(rows, heads)](parts, sums, out_BHD, heads, value_size, splits, tile, num_warps=4)
        return out_BHD

    def write(self, keys_NKD: Tensor, values_NKD: Tensor, pages: Pages, slots_N: Tensor) -> None:
        keys, values = pages.keys, pages.values
        tokens, kv_heads, size = keys_NKD.shape
        value_size = values_NKD.shape[2]
        keys_NKD, values_NKD = dense(keys_NKD), dense(values_NKD)
        strides = *keys_NKD.stride()[:2], *values_NKD.stride()[:2], *keys.stride()[:3], *values.stride()[:3]
        given = keys_NKD, values_NKD, *_tensors(pages), slots_N, *strides
        sizes = {"KV_HEADS": kv_heads, "SIZE": size, "VALUE_SIZE": value_size, "BLOCK_SIZE": keys.shape[1]}
        sizes["TILE"] = triton.next_power_of_2(max(size, value_size))
        kind = {"IS_QUANTISED": pages.key_scales is not None, "ROUNDS": keys.dtype == torch.int8}
        with on_device_of(keys_NKD):
            largest = LARGEST.get(keys.dtype, 1.0)
            store[(tokens, kv_heads, 2)](*given, **sizes, **kind, LARGEST=largest, num_warps=1)


def _sizes(group: int, size: int, value_size: int, element_bytes: int) -> dict[str, int]:
    tile_size, tile_value = (max(16, triton.next_power_of_2(x)) for x in (size, value_size))
    return {
        "GROUP": group,
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "TILE_HEADS": max(TILE_HEADS, triton.next_power_of_2(group)),
        "TILE_KEYS": max(16, min(64, TILE_BYTES // (tile_size * element_bytes))),
        "TILE_SIZE": tile_size,
        "TILE_VALUE": tile_value,
    }


def _states(out_BHD: Tensor, stretches: int) -> tuple[Tensor, Tensor]:
    """Return averages over a stretch of keys, and their weights as logarithms."""
    rows, heads, value_size = out_BHD.shape
    parts = out_BHD.new_empty(rows, heads, stretches, value_size, dtype=torch.float32)
    return parts, out_BHD.new_empty(rows, heads, stretches, dtype=torch.float32)


def _tensors(pages: Pages) -> list[Tensor]:
    """Return keys, values and their scales; a pool takes the place of missing scales."""
    scales = [pool if found is None else found for pool, found in pages.sides]
    return [pages.keys, pages.values, *scales]


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    lengths,
    sinks,
    shared_tokens,
    shared_rows,
    shared_parts,
    shared_sums,
    parts,
    sums,
    scale,
    softcap,
    window,
    query_row,
    query_head,
    key_block,
    key_place,
    key_head,
    value_block,
    value_place,
    value_head,
    table_row,
    max_keys,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    TILE_VALUE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    # names of arguments that end in _row, _head, _block, _place are strides
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    count = 1
    if IS_SHARED:
        count = tl.load(shared_rows + row)  # 0 but for the first of the rows that share
    in_tile = tl.arange(0, TILE_HEADS)
    is_head = in_tile < count * GROUP
    heads = kv_head * GROUP + in_tile % GROUP
    rows = row + in_tile // GROUP
    place_of = rows * HEADS + heads
    dims = tl.arange(0, TILE_SIZE)
    value_dims = tl.arange(0, TILE_VALUE)
    is_dim = dims < SIZE
    is_value_dim = value_dims < VALUE_SIZE
    q = tl.load(
        queries + (rows * query_row + heads * query_head)[:, None] + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    )

    # a row that has ended may ride along past the end of its table
    length = tl.minimum(tl.load(lengths + row), max_keys)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    if HAS_SHARED:
        first = tl.load(shared_tokens + row)
    if IS_SHARED:
        length = tl.where(count > 0, tl.load(shared_tokens + row), 0)
    stretch = tl.cdiv(tl.cdiv(length - first, TILE_KEYS), SPLITS) * TILE_KEYS
    start = first + split * stretch
    end = tl.minimum(start + stretch, length)

    top = tl.full([TILE_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_HEADS], tl.float32)
    if HAS_SINKS:
        # a sink is a key without a value, seen by the first stretch
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, total + 1.0, total)
    gathered = tl.zeros([TILE_HEADS, TILE_VALUE], tl.float32)
    if HAS_SHARED:
        is_joined = is_head & (first > 0) & (split == 0)
        for stretch_of in range(SHARED):
            at = place_of * SHARED + stretch_of
            log = tl.load(shared_sums + at, mask=is_joined, other=float("-inf"))
            part = tl.load(
                shared_parts + at[:, None] * VALUE_SIZE + value_dims[None, :],
                mask=is_joined[:, None] & is_value_dim[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, log)
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp(top - finite)
            weight = tl.exp(log - finite)
            total = total * shrink + weight
            gathered = gathered * shrink[:, None] + part * weight[:, None]
            top = new_top

    for base in range(start, end, TILE_KEYS):
        at = base + tl.arange(0, TILE_KEYS)
        is_key = at < end
        block = tl.load(tables + row * table_row + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = at % BLOCK_SIZE
        k = tl.load(
            keys + (block * key_block + place * key_place + kv_head * key_head)[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        v = tl.load(
            values + (block * value_block + place * value_place + kv_head * value_head)[:, None] + value_dims[None, :],
            mask=is_key[:, None] & is_value_dim[None, :],
            other=0.0,
        )
        # By way of fp32: compute capability 8.9 cannot convert 8-bit floats to bf16 directly.
        if IS_QUANTISED:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        scale_at = (block * BLOCK_SIZE + place) * (HEADS // GROUP) + kv_head
        if IS_QUANTISED:
            s *= tl.load(key_scales + scale_at, mask=is_key, other=0.0)[None, :]
        if HAS_SOFTCAP:
            s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)  # tanh
        s = tl.where(is_key[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(s - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if IS_QUANTISED:
            weights *= tl.load(value_scales + scale_at, mask=is_key, other=0.0)[None, :]
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        top = new_top

    divisor = tl.where(total == 0.0, 1.0, total)  # a stretch without keys
    gathered = gathered / divisor[:, None]
    mask = is_head[:, None] & is_value_dim[None, :]
    if SPLITS == 1:
        tl.store(
            parts + place_of[:, None] * VALUE_SIZE + value_dims[None, :], gathered.to(parts.dtype.element_ty), mask=mask
        )
    else:
        place_of = place_of * SPLITS + split
        tl.store(parts + place_of[:, None] * VALUE_SIZE + value_dims[None, :], gathered, mask=mask)
        tl.store(sums + place_of, top + tl.log(divisor), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def join(  # type: ignore[no-untyped-def]
    parts, sums, out, HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, SPLITS: tl.constexpr, TILE_VALUE: tl.constexpr
):
    # parts are averages over a stretch; their weight is the logarithm in `sums`, -inf for an empty one
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, TILE_VALUE)
    is_dim = dims < VALUE_SIZE
    logs = tl.load(sums + place * SPLITS + splits)
    part = tl.load(
        parts + (place * SPLITS + splits)[:, None] * VALUE_SIZE + dims[None, :], mask=is_dim[None, :], other=0.0
    )
    top = tl.max(logs, 0)
    weights = tl.exp(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    gathered = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * VALUE_SIZE + dims, gathered.to(out.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator]
def store(  # type: ignore[no-untyped-def]
    new_keys,
    new_values,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    new_key_token,
    new_key_head,
    new_value_token,
    new_value_head,
    key_block,
    key_place,
    key_head,
    value_block,
    value_place,
    value_head,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    ROUNDS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    place = slot % BLOCK_SIZE
    dims = tl.arange(0, TILE)
    scale_at = slot * KV_HEADS + head
    if tl.program_id(2) == 0:
        x = tl.load(new_keys + token * new_key_token + head * new_key_head + dims, mask=dims < SIZE, other=0.0)
        if IS_QUANTISED:
            x, x_scale = _quantised(x, ROUNDS, LARGEST)
            tl.store(key_scales + scale_at, x_scale)
        target = keys + block * key_block + place * key_place + head * key_head + dims
        tl.store(target, x.to(keys.dtype.element_ty), mask=dims < SIZE)
    else:
        y = tl.load(
            new_values + token * new_value_token + head * new_value_head + dims, mask=dims < VALUE_SIZE, other=0.0
        )
        if IS_QUANTISED:
            y, y_scale = _quantised(y, ROUNDS, LARGEST)
            tl.store(value_scales + scale_at, y_scale)
        target = values + block * value_block + place * value_place + head * value_head + dims
        tl.store(target, y.to(values.dtype.element_ty), mask=dims < VALUE_SIZE)


@triton.jit  # type: ignore[untyped-decorator]
def _quantised(x, ROUNDS: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    # A sum with 0 x makes the scale NaN if any element is not finite, so that a broken model shows in its logits.
    scale = tl.where(largest == 0.0, 1.0, largest / LARGEST) + tl.sum(x * 0.0, 0)
    x = x / scale
    if ROUNDS:
        x = tl.floor(x + 0.5)
    return x, scale
