"""Packed rows: their segments, rows picked by index, and attention in plain PyTorch, padded inside, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.api import Tokens
from retrain_local.decoder import Attend, Scores

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Segments of a packed row, one after another: `lengths[s]` tokens each.

    A token of segment s attends to the tokens of its segment up to itself and, if `prefixes[s]` >= 0, to all tokens of
    that earlier segment, whose positions it continues: the prompt of a group, stored once. A prefix has no prefix.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> Spans:
        return cls(lengths=tuple(lengths), prefixes=(-1,) * len(lengths))

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of each segment, followed by the end of the last one."""
        return (0, *np.cumsum(self.lengths, dtype=np.int64).tolist())

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def positions(self) -> Tokens:
        """Return the position of every token in its row, [num_tokens]."""
        before = [self.lengths[prefix] if prefix >= 0 else 0 for prefix in self.prefixes]
        parts = [np.arange(n, n + length) for n, length in zip(before, self.lengths, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


MakeAttend = Callable[[Spans, torch.device], Attend]


class Picks:
    """Indices [M] of picked rows of a tensor of N rows, some picked several times, prepared once for all passes.

    The gradient of `index_select` is `index_add_`. On CUDA it adds in an arbitrary order, and in PyTorch's
    deterministic mode it sorts all indices first, at some ten launches a call. Here rows that are picked equally often
    are gathered side by side and summed along that axis: two launches for each count, one to three in a pack.
    """

    def __init__(self, index_M: np.ndarray, num_rows: int, device: torch.device) -> None:
        order_M = np.argsort(index_M, kind="stable")
        sorted_M = index_M[order_M]  # np.unique would import numpy.ma
        starts = np.flatnonzero(np.diff(sorted_M, prepend=-1))
        rows, counts = sorted_M[starts], np.diff(starts, append=len(sorted_M))
        self.num_rows = num_rows
        self.index_M = torch.from_numpy(index_M).to(device)
        self.is_covering = len(rows) == num_rows
        # (rows, [rows, times] places of each among the M)
        self.by_times: list[tuple[Tensor, Tensor]] = []
        for times in sorted(set(counts.tolist())):
            chosen = counts == times
            places = order_M[starts[chosen][:, None] + np.arange(times)[None, :]]
            self.by_times.append((torch.from_numpy(rows[chosen]).to(device), torch.from_numpy(places).to(device)))

    def of(self, x_N: Tensor) -> Tensor:
        """Return x[index_M], differentiable; gradients are summed in fp32 in a fixed order."""
        return _Picked.apply(x_N, self)


class _Picked(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, picks: Picks) -> Tensor:
        ctx.picks = picks
        return x_N.index_select(0, picks.index_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        picks, (g_M,) = ctx.picks, gradients
        shape = picks.num_rows, *g_M.shape[1:]
        g_N = g_M.new_empty(shape) if picks.is_covering else g_M.new_zeros(shape)
        for rows, places in picks.by_times:
            taken = g_M.index_select(0, places.flatten())
            if places.shape[1] > 1:
                taken = taken.unflatten(0, places.shape).sum(1, dtype=torch.float32).to(g_M.dtype)
            g_N.index_copy_(0, rows, taken)
        return g_N, None


# Relative to the longest segment of a bucket. It bounds the cost of padding to two thirds.
SHORTEST_SHARE = 0.6
# Queries x keys of a bucket, to bound the memory of its mask; a larger segment has its own bucket.
MASK_ELEMENTS = 2**24
# On a CPU queries are computed in at most so many parts, each with the keys that its last one sees: PyTorch's kernel
# computes every masked block. Forward and backward take 0.77 of the time at 256 queries, 0.58 at 2,000.
QUERY_PARTS, FEWEST_QUERIES = 8, 64


class PaddedAttend:
    """`Attend` over the segments of one packed row; differentiable.

    The linear layers of a model see no padding. Only here segments are put side by side, longest first, in buckets
    whose members differ little in length. Tokens are moved there and back by index, each exactly once.
    """

    def __init__(self, spans: Spans, device: torch.device) -> None:
        self._buckets = [_Bucket.of(spans, members, device) for members in _members(spans)]
        index_P = np.concatenate([bucket.index_ST.ravel() for bucket in self._buckets])
        is_token_P = np.concatenate([bucket.is_token_ST.ravel() for bucket in self._buckets])
        places_N = np.empty(spans.num_tokens, np.int64)
        places_N[index_P[is_token_P]] = np.flatnonzero(is_token_P)
        self._index_P = torch.from_numpy(index_P).to(device)
        self._places_N = torch.from_numpy(places_N).to(device)
        self._pads_Q = torch.from_numpy(np.flatnonzero(~is_token_P)).to(device)
        self._masks: dict[tuple[int, torch.dtype, int | None, int | None], Tensor] = {}

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        sizes = [bucket.index_ST.size for bucket in self._buckets]
        places = self._index_P, self._places_N
        padded = [_Moved.apply(x, *places).split(sizes) for x in (queries_NHD, keys_NKD, values_NKD)]
        parts = []
        for number, bucket in enumerate(self._buckets):
            queries, keys, values = (x[number].unflatten(0, bucket.index_ST.shape) for x in padded)
            if (index := bucket.prefix_SP) is not None:
                keys, values = (
                    torch.cat([x.index_select(0, index.flatten()).unflatten(0, index.shape), own], dim=1)
                    for x, own in ((keys_NKD, keys), (values_NKD, values))
                )
            q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
            parts.append(self._attended(number, q, k, v, scores).transpose(1, 2).flatten(0, 1))
        return _Moved.apply(torch.cat(parts), self._places_N, self._index_P, self._pads_Q)

    def _attended(self, number: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        is_plain = scores.softcap is None and scores.sinks_H is None
        given: dict[str, Any] = {"scale": scores.scale, "enable_gqa": True}
        is_causal = scores.window is None and scores.chunk is None
        if is_plain and self._buckets[number].prefix_SP is None and is_causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **given)
        # 0 for a visible key and -inf for others: [segments or 1, 1, queries, prefix + keys].
        key = number, q.dtype, scores.window, scores.chunk
        if key not in self._masks:
            seen = self._buckets[number].seen(scores.window, scores.chunk)
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=seen.device).masked_fill_(~seen, -math.inf)
            self._masks[key] = mask[:, None]
        mask = self._masks[key]
        if not is_plain:
            return dense_attention(q, k, v, mask, scores)
        queries, before = q.shape[2], k.shape[2] - q.shape[2]
        rows = max(FEWEST_QUERIES, -(-queries // QUERY_PARTS)) if q.device.type == "cpu" else queries
        parts = []
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            given["attn_mask"], seen = mask[:, :, start:end, : before + end], slice(before + end)
            part = F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, seen], v[:, :, seen], **given)
            parts.append(part.transpose(1, 2))  # back in the order that the kernel writes
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """S segments padded to T tokens, the last of each repeated, and P tokens of the prefixes that they continue."""

    index_ST: np.ndarray
    is_token_ST: np.ndarray
    device: torch.device
    prefix_SP: Tensor | None = None
    prefix_lengths_S: Tensor | None = None

    @classmethod
    def of(cls, spans: Spans, members: list[int], device: torch.device) -> _Bucket:
        starts, lengths = np.array(spans.starts), np.array(spans.lengths)
        index_ST, is_token_ST = _side_by_side(starts[members], lengths[members])
        prefixes = np.array(spans.prefixes)[members]
        if prefixes[0] < 0:
            return cls(index_ST=index_ST, is_token_ST=is_token_ST, device=device)
        prefix_SP, _ = _side_by_side(starts[prefixes], lengths[prefixes])
        return cls(
            index_ST=index_ST,
            is_token_ST=is_token_ST,
            device=device,
            prefix_SP=torch.from_numpy(prefix_SP).to(device),
            prefix_lengths_S=torch.from_numpy(lengths[prefixes]).to(device),
        )

    def seen(self, window: int | None, chunk: int | None = None) -> Tensor:
        """Return True for the keys that a query sees, [segments or 1, queries, prefix + keys]."""
        at = torch.arange(self.index_ST.shape[1], device=self.device)
        distance = (at[:, None] - at[None, :])[None]
        seen, keys = distance >= 0, at[None]
        if self.prefix_SP is not None and self.prefix_lengths_S is not None:
            lengths = self.prefix_lengths_S[:, None, None]
            before = torch.arange(self.prefix_SP.shape[1], device=self.device)[None, None, :]
            ahead = lengths + at[None, :, None] - before
            own = seen.expand(len(lengths), -1, -1)
            seen = torch.cat([(before < lengths).expand(-1, len(at), -1), own], dim=2)
            distance = torch.cat([ahead, distance.expand(len(lengths), -1, -1)], dim=2)
            keys = torch.cat([before[0].expand(len(lengths), -1), lengths[:, 0] + at], dim=1)
        if chunk is not None:
            queries = keys[:, None, :] + distance
            seen = seen & (queries // chunk == keys[:, None, :] // chunk)
        return seen if window is None else seen & (distance < window)


def _members(spans: Spans) -> Iterator[list[int]]:
    """Yield the segments of each bucket: all with a prefix or all without, longest first, of similar length."""

    def fits(bucket: list[int], s: int) -> bool:
        longest = spans.lengths[bucket[0]]
        keys = longest + (max(spans.lengths[spans.prefixes[m]] for m in [*bucket, s]) if spans.prefixes[s] >= 0 else 0)
        is_small = (len(bucket) + 1) * longest * keys <= MASK_ELEMENTS
        return is_small and spans.lengths[s] >= SHORTEST_SHARE * longest

    for continues in (False, True):
        chosen = [s for s, prefix in enumerate(spans.prefixes) if (prefix >= 0) == continues and spans.lengths[s]]
        yield from runs_of(sorted(chosen, key=lambda s: -spans.lengths[s]), fits)


def runs_of(items: Iterable[T], fits: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Yield runs of items; each ends before an item that does not fit to it."""
    run: list[T] = []
    for item in items:
        if run and not fits(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _side_by_side(starts_S: np.ndarray, lengths_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the tokens of each segment, [S, longest], and a mask that is False for padding."""
    columns_T = np.arange(int(lengths_S.max()))
    index_ST = starts_S[:, None] + np.minimum(columns_T[None, :], lengths_S[:, None] - 1)
    return index_ST, columns_T[None, :] < lengths_S[:, None]


class _Moved(torch.autograd.Function):  # type: ignore[misc]
    """x[there]; its gradient is a plain gather, g[back], since padding has none (a scatter-add is slow).

    Of an x with padding, at `pads`, that is dropped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, pads: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(back, pads)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back, pads = ctx.saved_tensors
        g = gradients[0].index_select(0, back)
        return g if pads is None else g.index_fill_(0, pads, 0.0), None, None, None


def dense_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """softmax(softcap(scale q k^T) + mask) v, with a sink in the denominator where `scores` has one.

    `queries` [rows, heads, length, size], `keys` and `values` [rows, kv_heads, keys, size]; `mask` is added to the
    scores and broadcasts to [rows, 1, length, keys]. Weights are computed in fp32, as in transformers.
    """
    rows, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads * length, size)
    weights = (grouped @ keys.transpose(2, 3) * scores.scale).view(rows, heads, length, -1)
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if mask is not None:
        weights = weights + mask
    sinks_H11 = None if scores.sinks_H is None else scores.sinks_H.view(heads, 1, 1)
    weights = (
        softmax_with_sinks(weights.float(), sinks_H11)
        .to(values.dtype)
        .view(rows, kv_heads, heads // kv_heads * length, -1)
    )
    return (weights @ values).view(rows, heads, length, values.shape[-1])


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last axis; `sinks` [..., 1], one more score each, are only in its denominator."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
