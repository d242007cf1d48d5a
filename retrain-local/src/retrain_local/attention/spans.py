"""Segments of a packed row and the prefixes that they continue, and rows picked by index in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.api import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Segments of a packed row, one after another: `lengths[s]` tokens each.

    A token of segment s attends to the tokens of its segment up to itself and, if `prefixes[s]` >= 0, to all tokens of
    that earlier segment, whose positions it continues. A prefix has no prefix. The prompt of a group is thus stored
    once, and each completion is a segment after it.
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


class Picks:
    """Indices [M] of picked rows of a tensor of N rows, some picked several times, prepared once for all passes.

    The gradient of `index_select` is `index_add_`. On CUDA it adds in an arbitrary order, and in PyTorch's
    deterministic mode it sorts all indices first, at some ten launches a call. Here rows that are picked equally often
    are gathered side by side and summed along that axis: two launches for each count that occurs, one to three in a
    pack.
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
        picked: Tensor = _Picked.apply(x_N, self)
        return picked


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
