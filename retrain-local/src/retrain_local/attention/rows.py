"""Packed rows side by side, for layers that read a row from its first token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from retrain_local.attention.packed import SHORTEST_SHARE, Picks, Spans, runs_of

Move = Callable[[Tensor], Tensor]


class WholeRows:
    """Every row of packed `spans` with its prefix, in calls of rows of similar length.

    Shorter rows are padded behind their end, where no token of a causal layer sees it; unless `pads`, a call holds rows
    of one length. A prefix that other segments continue is read with each of them, and its own result is the first's.
    """

    def __init__(self, spans: Spans, device: torch.device, *, pads: bool = True) -> None:
        starts, followed = spans.starts, {prefix for prefix in spans.prefixes if prefix >= 0}
        rows = []
        for segment, prefix in enumerate(spans.prefixes):
            parts = [np.arange(starts[s], starts[s + 1]) for s in ((prefix, segment) if prefix >= 0 else (segment,))]
            if spans.lengths[segment] and segment not in followed:
                rows.append(np.concatenate(parts))
        places_N, done = np.full(spans.num_tokens, -1), 0
        self._calls: list[tuple[Picks, tuple[int, int]]] = []
        share = SHORTEST_SHARE if pads else 1.0
        rows.sort(key=len, reverse=True)
        for part in runs_of(rows, lambda part, row_T: len(row_T) >= share * len(part[0])):
            width = len(part[0])
            padded = np.stack([np.pad(row_T, (0, width - len(row_T)), mode="edge") for row_T in part])
            for number, row_T in enumerate(part):
                fresh = places_N[row_T] < 0
                places_N[row_T[fresh]] = done + number * width + np.flatnonzero(fresh)
            done += padded.size
            self._calls.append((Picks(padded.ravel(), spans.num_tokens, device), (len(part), width)))
        self._places_N = torch.from_numpy(places_N).to(device)

    def through(self, run: Callable[[Move], Tensor]) -> Tensor:
        """Return the packed result of `run` over rows [S, T, ...]; its argument moves tensors of N tokens there."""
        parts = [run(partial(_side_by_side, picks, size)) for picks, size in self._calls]
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self._places_N)


def _side_by_side(picks: Picks, size: tuple[int, int], x_N: Tensor) -> Tensor:
    return picks.of(x_N).unflatten(0, size)
