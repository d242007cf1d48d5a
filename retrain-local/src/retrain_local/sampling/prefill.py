"""Prefill: computes the keys and values of the tokens that rows start from.

The beginning of a row may be in the pool: of the next turn of an episode, or of a preempted row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from retrain.api import Tokens
from retrain_local.attention.packed import MASK_ELEMENTS, SHORTEST_SHARE, MakeAttend, Spans, dense_attention, runs_of
from retrain_local.decoder import Attend, Decoder, Scores
from retrain_local.memory.sizes import runs
from retrain_local.model.states import Mixed, PromptMix
from retrain_local.sampling.cache import Cache, Pool
from retrain_local.sampling.schedule import Prefill

Note = Callable[[Sequence[Prefill]], None]


def fill(
    fills: Sequence[Prefill], decoder: Decoder, cache: Cache, packed: MakeAttend, *, max_tokens: int, note: Note
) -> None:
    """Copy the partial blocks, then compute the rest in forward passes of at most `max_tokens` tokens or one row.

    `note` is called with the rows of each forward pass before it starts.
    """
    cache.pool.copy(*([pair[side] for f in fills if (pair := f.copied)] for side in (0, 1)))
    if cache.states is not None:
        cache.states.clear([f.slot for f in fills if not f.past and not len(f.tokens_T)])
        continued = [f for f in fills if f.past]
        cache.states.copy([f.source for f in continued], [f.slot for f in continued])
    work = [f for f in fills if len(f.tokens_T)]
    for is_fresh in (True, False):
        for part in runs((f for f in work if (f.past == 0) == is_fresh), max_tokens, lambda f: len(f.tokens_T)):
            note(part)
            _forward(part, decoder, cache, packed)


def _forward(fills: Sequence[Prefill], decoder: Decoder, cache: Cache, packed: MakeAttend) -> None:
    """Run a forward pass over the packed tokens; its layers write keys, values and states to the cache."""
    pool = cache.pool
    lengths, pasts = [len(f.tokens_T) for f in fills], [f.past for f in fills]

    def on_device(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(decoder.device)

    ends = [past + length for past, length in zip(pasts, lengths, strict=True)]
    slots_N = on_device([slots_of(f.blocks, f.past, end, pool.block_size) for f, end in zip(fills, ends, strict=True)])
    positions_N = on_device([np.arange(past, end) for past, end in zip(pasts, ends, strict=True)])
    attend: Attend
    if pasts[0]:
        attend = ContinuedAttention(pool, slots_N, [f.blocks for f in fills], pasts, lengths)
    else:
        attend = FreshAttention(pool, slots_N, packed(Spans.apart(lengths), decoder.device))
    if cache.states is not None:
        mix = PromptMix(cache.states, [f.slot for f in fills], lengths, continues=pasts[0] > 0)
        attend = Mixed(attend, mix)
    decoder.hidden(on_device([f.tokens_T for f in fills]), positions_N, attend)


def slots_of(blocks: Sequence[int], start: int, stop: int, block_size: int) -> Tokens:
    positions = np.arange(start, stop)
    table = np.asarray(blocks, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size


class FreshAttention:
    """Packed rows without a cached prefix: `attend` computes them, and their keys and values are stored."""

    def __init__(self, pool: Pool, slots_N: Tensor, attend: Attend) -> None:
        self._pool, self._slots_N, self._attend = pool, slots_N, attend

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        self._pool.write(layer, self._slots_N, keys_NKD, values_NKD)
        return self._attend(layer, queries_NHD, keys_NKD, values_NKD, scores)


KEYS = 2**15  # gathered for one call; a longer row has its own call
# Another call costs as much as this many padded queries, or as padding every query once.
PADDED_QUERIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """`count` new tokens of a row: they begin at `start` of the packed tokens and at `position` of the row."""

    row: int
    start: int
    position: int
    count: int

    @property
    def keys(self) -> int:
        return self.position + self.count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """Pieces side by side: queries by index, their positions, and the slots of their keys in the pool.

    The last query and the last key of a piece are repeated to fill it up; such a key is behind every query.
    """

    index_RQ: Tensor
    positions_RQ: Tensor
    slots_RT: Tensor


class ContinuedAttention:
    """Packed rows: `pasts[r]` tokens are in the pool, `lengths[r]` follow; similar rows share a call."""

    def __init__(
        self, pool: Pool, slots_N: Tensor, tables: Sequence[Sequence[int]], pasts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._pool, self._slots_N, self._tables = pool, slots_N, tables
        self._masks: dict[tuple[int, int | None, int | None], Tensor] = {}
        groups = list(runs_of(sorted(_pieces(pasts, lengths), key=lambda piece: -piece.keys), _fits))
        self._buckets = [self._bucket(pieces) for pieces in groups]
        places_N, before = np.empty(sum(lengths), np.int64), 0
        for pieces in groups:
            width = max(piece.count for piece in pieces)
            for number, piece in enumerate(pieces):
                first = before + number * width
                places_N[piece.start : piece.start + piece.count] = np.arange(first, first + piece.count)
            before += len(pieces) * width
        self._places_N = torch.from_numpy(places_N).to(slots_N.device)

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        self._pool.write(layer, self._slots_N, keys_NKD, values_NKD)
        parts = []
        for number, bucket in enumerate(self._buckets):
            keys, values = self._pool.read(layer, bucket.slots_RT)
            queries = queries_NHD[bucket.index_RQ].transpose(1, 2)
            mask = self._mask(number, scores.window, scores.chunk, queries.dtype)
            if scores.softcap is None and scores.sinks_H is None:
                found = functional.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=mask, scale=scores.scale, enable_gqa=True
                )
            else:
                found = dense_attention(queries, keys, values, mask, scores)
            parts.append(found.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, self._places_N)

    def _bucket(self, pieces: Sequence[_Piece]) -> _Bucket:
        device, block_size = self._slots_N.device, self._pool.block_size
        queries_Q = np.arange(max(piece.count for piece in pieces))
        keys_T = np.arange(max(piece.keys for piece in pieces))
        within_RQ = np.stack([np.minimum(queries_Q, piece.count - 1) for piece in pieces])
        starts_R1, positions_R1 = (
            np.array([[getattr(piece, name)] for piece in pieces]) for name in ("start", "position")
        )
        slots_RT = np.stack(
            [slots_of(self._tables[p.row], 0, p.keys, block_size)[np.minimum(keys_T, p.keys - 1)] for p in pieces]
        )
        return _Bucket(
            index_RQ=torch.from_numpy(starts_R1 + within_RQ).to(device),
            positions_RQ=torch.from_numpy(positions_R1 + within_RQ).to(device),
            slots_RT=torch.from_numpy(slots_RT).to(device),
        )

    def _mask(self, number: int, window: int | None, chunk: int | None, dtype: torch.dtype) -> Tensor:
        """Return 0 for a visible key and -inf for others, [R, 1, Q, T], for all layers."""
        if (number, window, chunk) not in self._masks:
            bucket = self._buckets[number]
            keys_T = torch.arange(bucket.slots_RT.shape[1], device=bucket.positions_RQ.device)
            distance_RQT = bucket.positions_RQ[:, :, None] - keys_T
            hidden_RQT = distance_RQT < 0
            if window is not None:
                hidden_RQT |= distance_RQT >= window
            if chunk is not None:
                hidden_RQT |= bucket.positions_RQ[:, :, None] // chunk != keys_T // chunk
            mask_RQT = torch.zeros(hidden_RQT.shape, dtype=dtype, device=keys_T.device)
            self._masks[number, window, chunk] = mask_RQT.masked_fill_(hidden_RQT, -math.inf)[:, None]
        return self._masks[number, window, chunk]


def _pieces(pasts: Sequence[int], lengths: Sequence[int]) -> Iterator[_Piece]:
    start = 0
    for row, (past, length) in enumerate(zip(pasts, lengths, strict=True)):
        size = max(1, MASK_ELEMENTS // (past + length))
        for first in range(0, length, size):
            count = min(size, length - first)
            yield _Piece(row=row, start=start + first, position=past + first, count=count)
        start += length


def _fits(group: list[_Piece], piece: _Piece) -> bool:
    longest, counts = group[0].keys, [each.count for each in (*group, piece)]
    padded = len(counts) * max(counts)
    is_small = padded * longest <= MASK_ELEMENTS and len(counts) * longest <= KEYS
    return is_small and piece.keys >= SHORTEST_SHARE * longest and padded <= 2 * sum(counts) + PADDED_QUERIES
