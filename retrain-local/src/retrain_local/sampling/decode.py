"""The decoding step: one more token for every row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain_local.attention.pages import PagedKernels
from retrain_local.decoder import Attend, Decoder, Scores, Target
from retrain_local.sampling.draw import Draw, draw_tokens
from retrain_local.sampling.pool import Pool
from retrain_local.sampling.rows import Row, uniforms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """All that a segment of S steps over B rows reads and writes, in tensors at fixed addresses.

    `ids_B` is the token to read next and `positions_B` its position in its row; `tables_BM` (int32) are the block
    tables and `lengths_B` (int32) the number of visible keys, the token being read included. `slots_SB` are the slots
    each step writes to; a row without a block there writes to the scratch block. `column_1` is the number of the step.
    """

    ids_B: Tensor
    positions_B: Tensor
    tables_BM: Tensor
    lengths_B: Tensor
    slots_B: Tensor
    slots_SB: Tensor
    uniforms_SB: Tensor
    temperature: Tensor
    column_1: Tensor
    tokens_SB: Tensor
    logprobs_SB: Tensor
    entropies_SB: Tensor

    @classmethod
    def allocate(cls, rows: int, width: int, steps: int, device: torch.device) -> Batch:
        """Rows that read token 0 and write to scratch; `width` is the longest table."""

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            ids_B=zeros(rows),
            positions_B=zeros(rows),
            tables_BM=zeros(rows, width, dtype=torch.int32),
            lengths_B=zeros(rows, dtype=torch.int32),
            slots_B=zeros(rows),
            slots_SB=zeros(steps, rows),
            uniforms_SB=zeros(steps, rows, dtype=torch.float64),
            temperature=zeros(dtype=torch.float32),
            column_1=zeros(1),
            tokens_SB=zeros(steps, rows),
            logprobs_SB=zeros(steps, rows, dtype=torch.float32),
            entropies_SB=zeros(steps, rows, dtype=torch.float32),
        )

    @property
    def advanced(self) -> tuple[Tensor, ...]:
        """Tensors that a step changes and the next one reads."""
        return self.ids_B, self.positions_B, self.lengths_B, self.column_1

    def load(self, rows: Sequence[Row], temperature: float, steps: int, block_size: int) -> None:
        """Prepare `steps` steps of these rows; the rest of the batch is padding."""
        size, width = self.tables_BM.shape
        tables = np.zeros((size, width), dtype=np.int32)
        for place, row in enumerate(rows):
            seen = row.blocks[:width]  # of those ahead none is needed yet
            tables[place, : len(seen)] = seen
        cached = np.zeros(size, dtype=np.int64)
        cached[: len(rows)] = [row.cached for row in rows]
        positions_SB = cached[None, :] + np.arange(steps)[:, None]
        blocks_SB = tables[np.arange(size)[None, :], np.minimum(positions_SB // block_size, width - 1)]
        ids = np.zeros(size, dtype=np.int64)
        ids[: len(rows)] = [row.last for row in rows]
        drawn = np.zeros((steps, size))
        drawn[:, : len(rows)] = uniforms(rows, steps).T
        for target, array in (
            (self.ids_B, ids),
            (self.positions_B, cached),
            (self.tables_BM, tables),
            (self.lengths_B, (cached + 1).astype(np.int32)),
            (self.slots_SB[:steps], blocks_SB.astype(np.int64) * block_size + positions_SB % block_size),
            (self.uniforms_SB[:steps], drawn),
        ):
            target.copy_(torch.from_numpy(array))
        self.temperature.fill_(temperature)
        self.column_1.zero_()

    def cached_slots(self, block_size: int) -> Tensor:
        """Slots [B, L] of the tokens before the one to read, as `load` left them; scratch behind the end of a row."""
        columns_L = torch.arange(int(self.positions_B.max()), device=self.positions_B.device)
        slots_BL = self.tables_BM.long()[:, columns_L // block_size] * block_size + columns_L % block_size
        return slots_BL * (columns_L < self.positions_B[:, None])


class PagedAttention:
    """`PagedAttend` of one token per row and step, by kernels that read the blocks of the pool in place."""

    def __init__(self, pool: Pool, batch: Batch, kernels: PagedKernels) -> None:
        self._pool, self._batch, self._kernels = pool, batch, kernels

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        self._kernels.write(keys_NKD, values_NKD, self._pool.layers[layer], self._batch.slots_B)
        return self.read(layer, queries_NHD, scores)

    def target(self, layer: int) -> Target | None:
        if not self._pool.is_exact:
            return None
        keys_SKD, values_SKD = (cells.flatten(0, 1) for cells, _ in self._pool.layers[layer].sides)
        return Target(keys_SKD=keys_SKD, values_SKD=values_SKD, slots_B=self._batch.slots_B)

    def read(self, layer: int, queries_NHD: Tensor, scores: Scores) -> Tensor:
        batch = self._batch
        return self._kernels.read(queries_NHD, self._pool.layers[layer], batch.tables_BM, batch.lengths_B, scores)


def decode_step(
    decoder: Decoder, attend: Attend, batch: Batch, *, entropy: bool, draw_tokens: Draw = draw_tokens
) -> None:
    """Read one token per row, sample the next one, and prepare to read that.

    Sizes depend on the batch alone and nothing is copied to the host, so that CUDA graphs can capture the step.
    """
    torch.index_select(batch.slots_SB, 0, batch.column_1, out=batch.slots_B.view(1, -1))
    positions_B = batch.positions_B
    if decoder.shape.context is not None:
        # finished rows stay to the end of the segment, possibly past the last valid position
        positions_B = positions_B.clamp(max=decoder.shape.context - 1)
    logits_BV = decoder.logits(decoder.hidden(batch.ids_B, positions_B, attend))
    uniforms_B = batch.uniforms_SB.index_select(0, batch.column_1)[0]
    draw = draw_tokens(logits_BV, batch.temperature, uniforms_B, entropy=entropy)
    batch.tokens_SB.index_copy_(0, batch.column_1, draw.tokens_B[None])
    batch.logprobs_SB.index_copy_(0, batch.column_1, draw.logprobs_B[None])
    if draw.entropies_B is not None:
        batch.entropies_SB.index_copy_(0, batch.column_1, draw.entropies_B[None])
    batch.ids_B.copy_(draw.tokens_B)
    for counter in (batch.positions_B, batch.lengths_B, batch.column_1):
        counter.add_(1)
