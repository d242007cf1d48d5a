"""The memory of a fake card: bytes that live now, peaks by phase, private pools of graphs, and running out of it."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any

import torch

from tests.kit.fake_gpu.card import MIB, Card

ALIGNMENT = 512  # PyTorch's allocator rounds every block up to a multiple


class Memory:
    """Owns every storage on the card until its last tensor is gone.

    `live` counts the storages outside graphs, `reserved` is the allocator's largest `live` since its cache was emptied.
    A capture allocates from a private pool: graphs of one pool run one after another, so it is as large as the largest.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.live = self.reserved = self.in_capture = 0
        self.peaks: dict[str, int] = defaultdict(int)
        self.most_reserved = 0
        self._pools: dict[int, int] = {}
        self._owned: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, list[int]] = {}  # of the storage that owns the address, in a list that it shares

    @property
    def pool_bytes(self) -> int:
        return sum(self._pools.values())

    @property
    def held(self) -> int:
        return self.live + self.pool_bytes

    @property
    def free(self) -> int:
        return self.card.usable_bytes - self.reserved - self.pool_bytes

    def own(self, tensor: torch.Tensor, phase: str, *, in_graph: bool) -> int | None:
        """Count a tensor's storage; return its key if it is new. OutOfMemoryError if it does not fit."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._owned.get(key)
        if known is not None and known() is not None:
            return None

        def gone(reference: weakref.ref[Any]) -> None:
            if self._owned.get(key) is reference:
                del self._owned[key]
            self._add(-sizes.pop(), in_graph)

        size = rounded(storage.nbytes())
        sizes = self._sizes[key] = [size]
        self._owned[key] = weakref.ref(storage, gone)
        self._add(size, in_graph)
        if not in_graph:
            self._fit(size, phase)
        return int(key)

    def resize(self, storage: torch.UntypedStorage, phase: str) -> None:
        """Count a storage that has been resized in place, as FSDP does to give up a gathered weight."""
        key, size = storage._cdata, rounded(storage.nbytes())
        reference = self._owned.get(key)
        if reference is not None and reference() is not None:
            (before,), self._sizes[key][:] = self._sizes[key], [size]
            self._add(size - before, False)
            self._fit(size, phase)

    def _add(self, size: int, in_graph: bool) -> None:
        if in_graph:
            self.in_capture += size
        else:
            self.live += size

    def _fit(self, size: int, phase: str) -> None:
        if self.held > self.card.usable_bytes:
            gc.collect()
        if self.held > self.card.usable_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / MIB:.0f} MiB (fake)")
        self.note(phase)

    def note(self, phase: str) -> None:
        self.reserved = max(self.reserved, self.live)
        self.most_reserved = max(self.most_reserved, self.reserved + self.pool_bytes)
        self.peaks[phase] = max(self.peaks[phase], self.held)

    def empty_cache(self) -> None:
        self.reserved = self.live

    def open_pool(self) -> GraphPool:
        """Return a pool whose bytes are given back with the last graph that holds it."""
        pool = GraphPool()
        self._pools[id(pool)] = 0
        weakref.finalize(pool, self._pools.pop, id(pool), None)
        return pool

    def grow_pool(self, pool: GraphPool, size: int, phase: str) -> None:
        self._pools[id(pool)] = max(self._pools.get(id(pool), 0), size)
        self.note(phase)


class GraphPool:
    """The handle of a private pool of graphs."""


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
