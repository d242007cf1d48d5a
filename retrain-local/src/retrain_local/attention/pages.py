"""Paged keys and values, and the kernels over them; CPUs do not have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain_local.attention.packed import dense_attention
from retrain_local.decoder import Scores

# By `kv_cache_dtype`; auto is the dtype of the model.
STORED = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# The stored value of the largest element of a head.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SHORTEST_STRETCH, MAX_STRETCHES = 128, 32
SHARED_STRETCHES = 2  # into which a shared prefix is cut


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One layer's pool: keys and values, [num_blocks, block_size, kv_heads, size].

    Slot s is place s % block_size of block s // block_size. A quantised pool (int8, float8_e4m3fn) has fp32 scales
    [num_blocks, block_size, kv_heads], and a stored number times its scale is the number meant.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        return (self.keys, self.key_scales), (self.values, self.value_scales)


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """Keys that neighbouring rows share: how many each row shares, and by how many rows, at the first of these.

    Other entries are 0. A key is read once for all of these rows.
    """

    tokens_B: Tensor
    rows_B: Tensor


def shared_heads(value_size: int) -> int:
    """Return the query heads, of all rows, that one program reads shared keys for: their sums fill its registers."""
    return 64 if value_size <= 128 else 32


def shared_prefixes(tables_BM: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the leading blocks that a row shares with its neighbours, at most `most` rows, and `Prefixes.rows_B`."""
    same = (tables_BM[1:] == tables_BM[:-1]) & (tables_BM[1:] > 0)  # block 0 is scratch
    common = [*np.cumprod(same, axis=1).sum(axis=1).tolist(), 0]  # with the next row
    blocks_B, rows_B = np.zeros((2, len(tables_BM)), dtype=np.int32)
    first = 0
    for row in range(len(tables_BM)):
        if common[row] and common[row] == common[first] and row + 1 - first < most:
            continue
        if row > first:
            blocks_B[first : row + 1], rows_B[first] = common[first], row + 1 - first
        first = row + 1
    return blocks_B, rows_B


class PagedKernels:
    """The definition that kernels agree with, in fp32; unlike it they never wait for the device (CUDA graphs)."""

    def write(self, keys_NKD: Tensor, values_NKD: Tensor, pages: Pages, slots_N: Tensor) -> None:
        """Write the keys and values of N tokens to their slots (int64); several may share a slot that is never read."""
        for new, (pool, scales) in zip((keys_NKD, values_NKD), pages.sides, strict=True):
            cells = new
            if scales is not None:
                scales_NK = new.float().abs().amax(-1) / LARGEST[pool.dtype]
                scales_NK = torch.where(scales_NK == 0, 1.0, scales_NK)
                scales.flatten(0, 1)[slots_N] = scales_NK
                cells = new.float() / scales_NK[..., None]
                cells = cells.round() if pool.dtype is torch.int8 else cells
            as_bytes(pool).flatten(0, 1)[slots_N] = as_bytes(cells.to(pool.dtype))

    def read(
        self,
        queries_BHD: Tensor,
        pages: Pages,
        tables_BM: Tensor,
        lengths_B: Tensor,
        scores: Scores,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        """Attend to `lengths_B` (int32) keys in the blocks `tables_BM` (int32): [B, heads, value_size], 0 without."""
        most = tables_BM.shape[1] * pages.keys.shape[1]
        gathered = []
        for queries_HD, table_M, length in zip(queries_BHD.float(), tables_BM.long(), lengths_B.tolist(), strict=True):
            length = min(length, most)
            if length == 0:
                gathered.append(queries_HD.new_zeros(len(queries_HD), pages.values.shape[-1]))
                continue
            first = max(0, length - (scores.window or length))
            states = []
            for pool, scales in pages.sides:
                cells = as_bytes(pool)[table_M].view(pool.dtype).float()
                cells = cells if scales is None else cells * scales[table_M][..., None]
                states.append(cells.flatten(0, 1)[first:length].transpose(0, 1)[None])
            keys, values = states
            gathered.append(dense_attention(queries_HD[None, :, None], keys, values, None, scores)[0, :, 0])
        return torch.stack(gathered).to(queries_BHD.dtype)


def key_stretches(programs: int, heads: int, max_keys: int) -> int:
    """Return the number of stretches, a power of two, for the keys of each of `heads` (rows x key heads).

    Two stretches cost a second launch per layer to join them, so the ratio is rounded to the nearest power, not up: an
    H100 takes 8 x 132 = 1,056 `programs`, and 128 rows of 8 key heads fill 1,024 of them uncut.
    """
    wanted = 1 << round(math.log2(max(1.0, programs / heads)))
    return max(1, min(wanted, MAX_STRETCHES, (1 << max(0, max_keys - 1).bit_length()) // SHORTEST_STRETCH))


def as_bytes(stored: Tensor) -> Tensor:
    """View 8-bit numbers as integers: not every device can fill, index or move 8-bit floats."""
    return stored.view(torch.int8) if stored.dtype.itemsize == 1 else stored


def zeros(size: tuple[int, ...], stored: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # numpy's zeros commit memory only when it is first written
        return torch.from_numpy(np.zeros(math.prod(size) * stored.itemsize, np.int8)).view(stored).view(size)
    filled = torch.int8 if stored.itemsize == 1 else stored
    return torch.zeros(size, dtype=filled, device=device).view(stored)
