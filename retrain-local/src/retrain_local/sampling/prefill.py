"""Prefill: computes the keys and values of the tokens that rows start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from retrain_local.attention.spans import Spans
from retrain_local.decoder import Attend, Decoder
from retrain_local.sampling.continued_attention import ContinuedAttention
from retrain_local.sampling.pool import Pool
from retrain_local.sampling.pool_attention import FreshAttention, slots_of
from retrain_local.sampling.schedule import Prefill

Packed = Callable[[Spans, torch.device], Attend]


def fill(
    fills: Sequence[Prefill],
    decoder: Decoder,
    pool: Pool,
    packed: Packed,
    *,
    max_tokens: int,
    note: Callable[[Sequence[Prefill]], None],
) -> None:
    """Copy the partial blocks, then compute the rest in forward passes of at most `max_tokens` tokens or one row.

    Rows without a cached prefix use the attention that `packed` makes, the others `ContinuedAttention`. `note` is
    called with the rows of each forward pass before it starts.
    """
    pool.copy(*([pair[side] for f in fills if (pair := f.copied)] for side in (0, 1)))
    work = [f for f in fills if len(f.tokens_T)]
    for is_fresh in (True, False):
        for part in _split([f for f in work if (f.past == 0) == is_fresh], max_tokens):
            note(part)
            _forward(part, decoder, pool, packed)


def _split(fills: Sequence[Prefill], max_tokens: int) -> Iterator[list[Prefill]]:
    part: list[Prefill] = []
    for each in fills:
        if part and sum(len(f.tokens_T) for f in part) + len(each.tokens_T) > max_tokens:
            yield part
            part = []
        part.append(each)
    if part:
        yield part


def _forward(fills: Sequence[Prefill], decoder: Decoder, pool: Pool, packed: Packed) -> None:
    """One forward pass over the packed tokens, for the keys and values that its layers write to the pool."""
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
    decoder.hidden(on_device([f.tokens_T for f in fills]), positions_N, attend)
