"""Implementations of `Attend` that write keys and values to the pool and read them from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from retrain_local.decoder import Attend, Scores, Target
from retrain_local.sampling.pool import Pool

if TYPE_CHECKING:
    from retrain.api import Tokens
    from retrain_local.attention.pages import PagedKernels
    from retrain_local.sampling.decode import Batch


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
