"""Computes the keys and values that rows begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from retrain_local.attention.spans import Spans
from retrain_local.decoder import Attend, Decoder
from retrain_local.sampling.attends import Continued, Written, slots_of
from retrain_local.sampling.pool import Pool
from retrain_local.sampling.schedule import Fill

Packed = Callable[[Spans, torch.device], Attend]


def fill(
    fills: Sequence[Fill],
    decoder: Decoder,
    pool: Pool,
    packed: Packed,
    *,
    most_tokens: int,
    note: Callable[[Sequence[Fill]], None],
) -> None:
    """Copy the blocks that these begin with, then compute the rest, `most_tokens` or one row in a forward.

    Rows that begin with their own first token attend as `packed` makes it, those behind keys of the pool by
    `Continued`. `note` is told what each forward is about to take on.
    """
    pool.copy(*([pair[side] for f in fills if (pair := f.copied)] for side in (0, 1)))
    work = [f for f in fills if len(f.tokens_T)]
    for is_fresh in (True, False):
        for part in _parts([f for f in work if (f.past == 0) == is_fresh], most_tokens):
            note(part)
            _forward(part, decoder, pool, packed)


def _parts(fills: Sequence[Fill], most_tokens: int) -> Iterator[list[Fill]]:
    part: list[Fill] = []
    for each in fills:
        if part and sum(len(f.tokens_T) for f in part) + len(each.tokens_T) > most_tokens:
            yield part
            part = []
        part.append(each)
    if part:
        yield part


def _forward(fills: Sequence[Fill], decoder: Decoder, pool: Pool, packed: Packed) -> None:
    """One pass over the packed tokens; only what its layers write into the pool is wanted."""
    lengths, pasts = [len(f.tokens_T) for f in fills], [f.past for f in fills]

    def on_device(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(decoder.device)

    ends = [past + length for past, length in zip(pasts, lengths, strict=True)]
    slots_N = on_device([slots_of(f.blocks, f.past, end, pool.block_size) for f, end in zip(fills, ends, strict=True)])
    positions_N = on_device([np.arange(past, end) for past, end in zip(pasts, ends, strict=True)])
    attend: Attend
    if pasts[0]:
        attend = Continued(pool, slots_N, [f.blocks for f in fills], pasts, lengths)
    else:
        attend = Written(pool, slots_N, packed(Spans.apart(lengths), decoder.device))
    decoder.hidden(on_device([f.tokens_T for f in fills]), positions_N, attend)
