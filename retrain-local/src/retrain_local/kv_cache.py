"""A key-value cache that grows in chunks and whose rows can be copied out and dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MIN_CHUNK = 64


class GrowingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [rows, heads, capacity, head size], of which `length` positions are in use.

    Appending a token writes one position. The stock dynamic cache copies the whole of it for every token instead,
    which is quadratic in the length of the completions. Sliding-window layers keep everything and rely on their mask.
    """

    keys: Tensor | None
    values: Tensor | None
    is_sliding = False
    is_compileable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, *states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        if self.length > self.keys.shape[2]:
            capacity = self.length + max(MIN_CHUNK, self.length // 2)
            self.keys, self.values = _grown(self.keys, start, capacity), _grown(self.values, start, capacity)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def right_align(self, sources_R: Tensor, pads_R: Tensor) -> None:
        """Row r becomes a copy of row `sources_R[r]`, moved to the right by `pads_R[r]` positions."""
        if self.keys is None or self.values is None:
            return
        columns = torch.arange(self.length, device=pads_R.device)
        columns_RT = (columns[None, :] - pads_R[:, None]).clamp_(min=0)  # a pad repeats a real entry: always finite
        # row and column indices with the head axis between them put the head axis last: move it back
        self.keys = self.keys.transpose(1, 2)[sources_R[:, None], columns_RT].transpose(1, 2)
        self.values = self.values.transpose(1, 2)[sources_R[:, None], columns_RT].transpose(1, 2)

    def keep(self, rows_R: Tensor) -> None:
        """Keep only these rows."""
        if self.keys is None or self.values is None:
            return
        self.keys = self.keys[:, :, : self.length].index_select(0, rows_R)
        self.values = self.values[:, :, : self.length].index_select(0, rows_R)

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query: int | Tensor, *args: Any) -> tuple[int, int]:
        new = query if isinstance(query, int) else query.shape[0]  # transformers 4 hands over the positions themselves
        return self.length + new, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def new_cache() -> Cache:
    """An empty cache; layers appear as the model writes them."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def right_align(cache: Cache, sources_R: Tensor, pads_R: Tensor) -> None:
    """Copy prompts out to their completions, from right-padded rows to left-padded ones."""
    for layer in cache.layers:
        layer.right_align(sources_R, pads_R)


def keep_rows(cache: Cache, rows_R: Tensor) -> None:
    """Drop every row but these."""
    for layer in cache.layers:
        layer.keep(rows_R)


def _grown(states: Tensor, length: int, capacity: int) -> Tensor:
    rows, heads, _, size = states.shape
    grown = states.new_empty((rows, heads, capacity, size))
    grown[:, :, :length] = states[:, :, :length]
    return grown
