"""The interface of kernels over paged keys and values; there are none for CPUs."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from retrain_local.decoder import Scores

STORED = {
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # by `kv_cache_dtype`; auto: the model's
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # stored value of the largest element of a head
SHORTEST_STRETCH, MAX_STRETCHES = 128, 32


class PagedKernels(Protocol):
    """Writes to and reads from one layer's pool, [num_blocks, block_size, kv_heads, size] of keys and of values.

    Slot s is place s % block_size of block s // block_size. A quantised pool (int8, float8_e4m3fn) has fp32 scales
    [num_blocks, block_size, kv_heads], and a stored number times its scale is the number meant. Neither waits for the
    device, and what is launched depends on shapes alone, so that both can be recorded in a CUDA graph.
    """

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
        """Write the keys and values of N tokens to their slots (int64); several may share a slot that is never read."""

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
        """Attention output of the newest token of each row, [B, heads, value_size]; zeros where the length is 0.

        `lengths_B` (int32) keys are seen, the first of its blocks `tables_BM` (int32).
        """


def key_stretches(programs: int, heads: int, max_keys: int) -> int:
    """Stretches, a power of two, into which the keys of each of `heads` (rows x key heads) are cut for `programs`.

    Two stretches cost a second launch per layer, which joins them, so the ratio is rounded to the nearest power rather
    than up: an H100 asks for 8 x 132 = 1,056 programs, and 128 rows of 8 key heads fill 1,024 of them uncut. No stretch
    is meant for fewer than 128 keys.
    """
    wanted = 1 << round(math.log2(max(1.0, programs / heads)))
    return max(1, min(wanted, MAX_STRETCHES, (1 << max(0, max_keys - 1).bit_length()) // SHORTEST_STRETCH))


def as_bytes(stored: Tensor) -> Tensor:
    """8-bit numbers viewed as integers, others unchanged: not every device can fill, index or move 8-bit floats."""
    return stored.view(torch.int8) if stored.dtype.itemsize == 1 else stored


def zeros(size: tuple[int, ...], stored: torch.dtype, device: torch.device) -> Tensor:
    """An empty pool."""
    filled = torch.int8 if stored.itemsize == 1 else stored
    return torch.zeros(size, dtype=filled, device=device).view(stored)
