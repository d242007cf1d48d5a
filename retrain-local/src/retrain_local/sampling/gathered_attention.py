"""Decoding in plain PyTorch: the keys and values of the running rows, gathered into one padded copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from retrain_local.attention.padded import dense_attention
from retrain_local.decoder import Scores
from retrain_local.sampling.decode import Batch
from retrain_local.sampling.pool import Pool
from retrain_local.sampling.rows import Row

COLUMNS = 32  # tokens a copy has room for: more means fewer gathers, and more to move when rows are dropped


class GatheredAttention:
    """`Attend` of one token per row and step, over a copy of the keys and values of these rows.

    Gathering from the pool for every token would move all keys and values twice as often as attention itself does. The
    copy is made once; every step appends one column, the same for all rows whatever their lengths, and finished rows
    are dropped. It is made again when a row joins or its `columns` are full. Except in fp32, the memory
    of keys is [rows, kv_heads, size, columns]: products of 16 bits would copy them to that layout every time.
    """

    def __init__(self, pool: Pool, rows: Sequence[Row], batch: Batch, columns: int) -> None:
        """`batch` has been loaded with these rows; room for `columns` more tokens."""
        self._pool = pool
        self._rows = list(rows)
        slots_BL = batch.cached_slots(pool.block_size)
        lengths_B1 = batch.positions_B[:, None]
        past = slots_BL.shape[1]
        self._vectors_BKC = pool.vectors_of(torch.cat([slots_BL, slots_BL.new_zeros(len(rows), columns)], dim=1))
        columns_C = torch.arange(past + columns, device=slots_BL.device)
        self._positions_BC = torch.where(columns_C < past, columns_C, lengths_B1 + columns_C - past)
        self._mask_BC = torch.zeros(self._positions_BC.shape, device=slots_BL.device)  # fp32, as softmax is
        self._mask_BC.masked_fill_((columns_C < past) & (columns_C >= lengths_B1), -math.inf)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}
        self._first = self._seen = past  # columns in use when the segment began, and now

    def continues(self, rows: Sequence[Row], steps: int) -> bool:
        """Prepare another segment of these rows; False if the copy has to be made again."""
        places = {id(row): place for place, row in enumerate(self._rows)}
        kept = [places.get(id(row)) for row in rows]
        if None in kept or self._seen + steps > self._mask_BC.shape[1]:
            return False
        self._first = self._seen
        if len(kept) < len(self._rows):
            self._rows = list(rows)
            kept_B = torch.tensor(kept, device=self._mask_BC.device)
            self._mask_BC, self._positions_BC = self._mask_BC[kept_B], self._positions_BC[kept_B]
            for layer, (keys, values) in self._layers.items():
                self._layers[layer] = self._laid_out(keys.index_select(0, kept_B)), values.index_select(0, kept_B)
        return True

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        """See `Attend`."""
        if layer == 0:
            self._seen += 1  # another step
            self._masks.clear()
        if layer not in self._layers:
            keys_BKCD, values_BKCD = self._pool.read(layer, self._vectors_BKC)
            self._layers[layer] = self._laid_out(keys_BKCD), values_BKCD
        keys_BKCD, values_BKCD = self._layers[layer]
        keys_BKCD[:, :, self._seen - 1] = self._pool.rounded(keys_NKD)
        values_BKCD[:, :, self._seen - 1] = self._pool.rounded(values_NKD)
        keys, values = keys_BKCD[:, :, : self._seen], values_BKCD[:, :, : self._seen]
        mask = self._mask(scores.window)
        if scores.softcap is None and scores.sinks_H is None:
            return _plain(queries_NHD, keys, values, mask, scores.scale)
        return dense_attention(queries_NHD[:, :, None], keys, values, mask[:, :1], scores)[:, :, 0]

    def finish(self, slots_SB: Tensor) -> None:
        """End a segment: write its columns to these slots of the pool."""
        slots_N = slots_SB[: self._seen - self._first].flatten()
        for layer, copies in self._layers.items():
            new = (states[:, :, self._first : self._seen].permute(2, 0, 1, 3).flatten(0, 1) for states in copies)
            self._pool.write(layer, slots_N, *new)

    def _laid_out(self, keys_BKCD: Tensor) -> Tensor:
        if keys_BKCD.dtype is torch.float32:
            return keys_BKCD
        return keys_BKCD.transpose(2, 3).contiguous().transpose(2, 3)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a row sees a column and -inf elsewhere, [B, kv_heads, 1, seen]; once for all layers of a step."""
        if window not in self._masks:
            mask_BC = self._mask_BC[:, : self._seen]
            if window is not None:
                positions_BC = self._positions_BC[:, : self._seen]
                mask_BC = mask_BC.masked_fill(positions_BC <= positions_BC[:, -1:] - window, -math.inf)
            self._masks[window] = mask_BC[:, None, None].expand(-1, self._vectors_BKC.shape[1], -1, -1).contiguous()
        return self._masks[window]


def _plain(queries_BHD: Tensor, keys_BKCD: Tensor, values_BKCD: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`dense_attention` of one query per head, in few calls; this is most of the time of decoding a small model."""
    rows, heads, size = queries_BHD.shape
    kv_heads = keys_BKCD.shape[1]
    queries = queries_BHD.reshape(rows * kv_heads, heads // kv_heads, size)
    keys = keys_BKCD.flatten(0, 1).transpose(1, 2)
    values, mask = values_BKCD.flatten(0, 1), mask.flatten(0, 1)
    if values.dtype is torch.float32:
        weights = torch.baddbmm(mask, queries, keys, alpha=scale)
    else:  # scores are scaled and masked in fp32
        weights = torch.add(mask, torch.bmm(queries, keys), alpha=scale)
    return torch.bmm(torch.softmax(weights, dim=-1).to(values.dtype), values).view(rows, heads, -1)
