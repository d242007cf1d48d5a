"""Rows picked by index, some of them several times, with a gradient that is summed in a fixed order on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Picks:
    """Which rows of a tensor of N rows are picked, [M]; every pass that needs them shares what is worked out here.

    The gradient of `index_select` is `index_add_`, which on CUDA adds in an arbitrary order, and in PyTorch's
    deterministic mode sorts all indices first, at some ten launches a call. Here rows that are picked equally often
    are gathered side by side and summed along that axis: two launches for each number of times that occurs, whatever
    the numbers are, of which a pack has one to three.
    """

    def __init__(self, index_M: np.ndarray, num_rows: int, device: torch.device) -> None:
        order_M = np.argsort(index_M, kind="stable")
        sorted_M = index_M[order_M]  # not np.unique, which would import numpy.ma
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
        """x[index_M], differentiable; sums are made in fp32."""
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
