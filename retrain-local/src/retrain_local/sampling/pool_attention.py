"""Implementations of `Attend` that write keys and values to the pool and read them from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain_local.attention.padded import dense_attention
from retrain_local.decoder import Attend, Scores, Target
from retrain_local.sampling.pool import Pool

if TYPE_CHECKING:
    from retrain.api import Tokens
    from retrain_local.attention.pages import PagedKernels
    from retrain_local.sampling.decode import Batch

MASK_ELEMENTS = 2**24  # queries x keys attended to in one call


class FreshAttention:
    """Packed rows without a cached prefix: another `Attend` computes them, and their keys and values are stored."""

    def __init__(self, pool: Pool, slots_N: Tensor, attend: Attend) -> None:
        self._pool = pool
        self._slots_N = slots_N
        self._attend = attend

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        """See `Attend`."""
        self._pool.write(layer, self._slots_N, keys_NKD, values_NKD)
        return self._attend(layer, queries_NHD, keys_NKD, values_NKD, scores)


class ContinuedAttention:
    """Packed rows with a cached prefix: `pasts[r]` tokens are in the pool, and `lengths[r]` new ones follow."""

    def __init__(
        self, pool: Pool, slots_N: Tensor, tables: Sequence[Sequence[int]], pasts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._pool = pool
        self._slots_N = slots_N
        self._tables = tables
        self._pasts = pasts
        self._lengths = lengths
        self._starts = np.cumsum([0, *lengths])

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        """See `Attend`."""
        self._pool.write(layer, self._slots_N, keys_NKD, values_NKD)
        parts = []
        for row, (past, length) in enumerate(zip(self._pasts, self._lengths, strict=True)):
            keys, values = self._row(layer, row, past + length)
            queries = queries_NHD[self._starts[row] : self._starts[row + 1]].transpose(0, 1)[None]
            size = max(1, MASK_ELEMENTS // (past + length))
            for first in range(0, length, size):
                piece = queries[:, :, first : first + size]
                at = torch.arange(past + first, past + first + piece.shape[2], device=piece.device)
                parts.append(_attended(piece, keys, values, at, scores)[0].transpose(0, 1))
        return torch.cat(parts)

    def _row(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row, [1, kv_heads, length, size]."""
        slots = torch.from_numpy(slots_of(self._tables[row], 0, length, self._pool.block_size)[None])
        return self._pool.read(layer, self._pool.vectors_of(slots.to(self._slots_N.device)))


class PagedAttention:
    """One token per row and step, by kernels that read the blocks of the pool in place."""

    def __init__(self, pool: Pool, batch: Batch, kernels: PagedKernels) -> None:
        self._pool = pool
        self._batch = batch
        self._kernels = kernels

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        """See `Attend`."""
        pool = self._pool
        kept = pool.keys[layer], pool.values[layer]
        self._kernels.write(keys_NKD, values_NKD, *kept, self._batch.slots_B, **self._scales(layer))
        return self.read(layer, queries_NHD, scores)

    def target(self, layer: int) -> Target | None:
        """See `PagedAttend`."""
        pool = self._pool
        if not pool.is_exact:
            return None
        cells = pool.keys[layer].flatten(0, 1), pool.values[layer].flatten(0, 1)
        return Target(keys_SKD=cells[0], values_SKD=cells[1], slots_B=self._batch.slots_B)

    def read(self, layer: int, queries_NHD: Tensor, scores: Scores) -> Tensor:
        """See `PagedAttend`."""
        pool, batch = self._pool, self._batch
        kept = pool.keys[layer], pool.values[layer], batch.tables_BM, batch.lengths_B
        return self._kernels.read(queries_NHD, *kept, scores, **self._scales(layer))

    def _scales(self, layer: int) -> dict[str, Tensor | None]:
        pool = self._pool
        return {
            "key_scales": pool.key_scales[layer] if pool.key_scales is not None else None,
            "value_scales": pool.value_scales[layer] if pool.value_scales is not None else None,
        }


def slots_of(blocks: Sequence[int], start: int, stop: int, block_size: int) -> Tokens:
    """Slots of the tokens `start` to `stop` of a row."""
    positions = np.arange(start, stop)
    table = np.asarray(blocks, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _attended(queries: Tensor, keys: Tensor, values: Tensor, at_Q: Tensor, scores: Scores) -> Tensor:
    """Attention of queries at these positions of one row, [1, heads, length, size]."""
    distance = at_Q[:, None] - torch.arange(keys.shape[2], device=at_Q.device)[None, :]
    hidden = distance < 0
    if scores.window is not None:
        hidden |= distance >= scores.window
    mask = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device).masked_fill_(hidden, -math.inf)
    if scores.softcap is None and scores.sinks_H is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scores.scale, enable_gqa=True
        )
    return dense_attention(queries, keys, values, mask, scores)
