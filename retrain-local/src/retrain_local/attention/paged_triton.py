"""Triton over pages of keys and values: reads for one new token per row, and writes. Imported only for CUDA.

A read is flash decoding: every program handles one row, one key head with all its query heads, and one stretch of the
row's keys; a second kernel joins the stretches. Lengths and block tables are read on the device and the grid depends on
the number of rows alone, so that a captured CUDA graph stays right while rows grow.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from retrain_local.attention.paged_kernels import attend, join, store
from retrain_local.attention.pages import LARGEST, key_stretches
from retrain_local.decoder import Scores

TILE_HEADS = 16  # the least number of rows that a tensor core multiplies
TILE_BYTES = 2**14  # of keys, as much of values, loaded while those before are worked on
PROGRAMS_PER_SM = 8


class TritonPages:
    """`PagedKernels` of one device, whose number of multiprocessors decides into how many stretches keys are cut."""

    def __init__(self, multiprocessors: int) -> None:
        self._programs = PROGRAMS_PER_SM * multiprocessors

    def read(
        self,
        queries_BHD: Tensor,
        keys: Tensor,
        values: Tensor,
        tables_BM: Tensor,
        lengths_B: Tensor,
        scores: Scores,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """What each row's newest token gathers from its `lengths_B` keys, [rows, heads, value_size]."""
        rows, heads, size = queries_BHD.shape
        block_size, kv_heads, value_size = values.shape[1:]
        max_keys = tables_BM.shape[1] * block_size
        splits = key_stretches(self._programs, rows * kv_heads, max_keys)
        queries_BHD = _last_dense(queries_BHD)
        out_BHD = queries_BHD.new_empty(rows, heads, value_size)
        parts, sums = out_BHD, out_BHD
        if splits > 1:
            parts = out_BHD.new_empty(rows, heads, splits, value_size, dtype=torch.float32)
            sums = out_BHD.new_empty(rows, heads, splits, dtype=torch.float32)
        pool = (
            keys,
            values,
            keys if key_scales is None else key_scales,
            values if value_scales is None else value_scales,
        )
        sinks = queries_BHD if scores.sinks_H is None else scores.sinks_H
        numbers = float(scores.scale), float(scores.softcap or 0.0), scores.window or 0
        strides = *queries_BHD.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables_BM.stride(0)
        sizes = _sizes(heads // kv_heads, size, value_size, keys.element_size())
        has = {"HAS_WINDOW": scores.window is not None, "HAS_SOFTCAP": scores.softcap is not None}
        has |= {"HAS_SINKS": scores.sinks_H is not None, "IS_QUANTISED": key_scales is not None}
        with on_device_of(queries_BHD):
            given = queries_BHD, *pool, tables_BM, lengths_B, sinks, parts, sums, *numbers, *strides, max_keys
            shape = {"HEADS": heads, "BLOCK_SIZE": block_size, "SPLITS": splits}
            # three stages: table, keys and values are all loaded ahead
            attend[(rows, kv_heads, splits)](*given, **shape, **sizes, **has, num_warps=4, num_stages=3)
            if splits > 1:
                tile = triton.next_power_of_2(value_size)
                join[(rows, heads)](parts, sums, out_BHD, heads, value_size, splits, tile, num_warps=4)
        return out_BHD

    def write(
        self,
        keys_NKD: Tensor,
        values_NKD: Tensor,
        keys: Tensor,
        values: Tensor,
        slots_N: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """Put the keys and values of N tokens at their slots, quantised where the pool is; one launch for both."""
        tokens, kv_heads, size = keys_NKD.shape
        value_size = values_NKD.shape[2]
        keys_NKD, values_NKD = _last_dense(keys_NKD), _last_dense(values_NKD)
        pool = (
            keys,
            values,
            keys if key_scales is None else key_scales,
            values if value_scales is None else value_scales,
        )
        strides = *keys_NKD.stride()[:2], *values_NKD.stride()[:2], *keys.stride()[:3], *values.stride()[:3]
        with on_device_of(keys_NKD):
            store[(tokens, kv_heads, 2)](
                keys_NKD,
                values_NKD,
                *pool,
                slots_N,
                *strides,
                KV_HEADS=kv_heads,
                SIZE=size,
                VALUE_SIZE=value_size,
                BLOCK_SIZE=keys.shape[1],
                TILE=triton.next_power_of_2(max(size, value_size)),
                IS_QUANTISED=key_scales is not None,
                ROUNDS=keys.dtype == torch.int8,
                LARGEST=LARGEST.get(keys.dtype, 1.0),
                num_warps=1,
            )


def _sizes(group: int, size: int, value_size: int, element_bytes: int) -> dict[str, int]:
    """Those of a head, and of what a program works on at a time: `TILE_BYTES` of keys."""
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


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device_of(x: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, whatever its arguments are on; -1 = leave it (the interpreter)."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
