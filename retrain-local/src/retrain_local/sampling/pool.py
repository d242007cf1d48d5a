"""The key-value pool: keys and values of all rows in blocks of a few tokens each, and the owners of each block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from retrain_local.attention.pages import LARGEST, STORED, Pages, as_bytes, zeros
from retrain_local.decoder import Shape

SCALE_BYTES = 4


class Pool:
    """Per layer keys [num_blocks, block_size, kv_heads, head_size] and values of the same form; block 0 is scratch.

    `kind` "auto" stores them in the dtype of the model, "bf16" rounds them. "int8" and "fp8" (e4m3) store, per token
    and head, one fp32 scale that maps the vector's largest magnitude to the largest number of the storage; scales are
    [num_blocks, block_size, kv_heads]. Slot s is position s % block_size of block s // block_size. The pool starts as
    zeros: reads beyond the end of a row are masked, which requires finite numbers.
    """

    def __init__(
        self, shape: Shape, *, tokens: int, block_size: int, kind: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_blocks = 1 + max(1, tokens // block_size)
        self.dtype = dtype
        self._stored = stored = STORED.get(kind, dtype)
        slots, sizes = (self.num_blocks, block_size, shape.kv_heads), (shape.head_size, shape.value_size)
        self.layers = [
            Pages(
                *(_zeros((*slots, size), dtype=stored, device=device) for size in sizes),
                *(_zeros(slots, dtype=torch.float32, device=device) for _ in sizes if stored in LARGEST),
            )
            for _ in range(shape.layers)
        ]

    @property
    def is_exact(self) -> bool:
        """Whether reads return exactly what was written."""
        return self._stored is self.dtype

    def write(self, layer: int, slots_N: Tensor, keys_NKD: Tensor, values_NKD: Tensor) -> None:
        """Write keys and values of N tokens to their slots."""
        for states_NKD, (stored, scales) in zip((keys_NKD, values_NKD), self.layers[layer].sides, strict=True):
            cells, scales_NK = self._encoded(states_NKD)
            as_bytes(stored).flatten(0, 1).index_copy_(0, slots_N, as_bytes(cells))
            if scales is not None and scales_NK is not None:
                scales.flatten(0, 1).index_copy_(0, slots_N, scales_NK)

    def read(self, layer: int, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at any vectors, [*vectors.shape, size] in the model's dtype.

        A vector is one head of one slot: number slot x kv_heads + head, see `vectors_of`.
        """
        found = []
        for stored, scales in self.layers[layer].sides:
            cells = as_bytes(stored).flatten(0, 2).index_select(0, vectors.flatten()).view(stored.dtype)
            taken = None if scales is None else scales.flatten().index_select(0, vectors.flatten())
            found.append(self._decoded(cells, taken).unflatten(0, vectors.shape))
        return found[0], found[1]

    def rounded(self, states_NKD: Tensor) -> Tensor:
        """These states as they would be read back."""
        return states_NKD if self.is_exact else self._decoded(*self._encoded(states_NKD))

    def vectors_of(self, slots: Tensor) -> Tensor:
        """Numbers of the vectors in these slots, [rows, tokens] to [rows, kv_heads, tokens]."""
        heads = self.layers[0].keys.shape[2]
        return slots[:, None] * heads + torch.arange(heads, device=slots.device)[:, None]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, all layers; every source is read before any target is written."""
        if not sources:
            return
        device = self.layers[0].keys.device
        sources_R, targets_R = (torch.tensor(list(blocks), device=device) for blocks in (sources, targets))
        for stored in (tensor for pages in self.layers for side in pages.sides for tensor in side):
            if stored is not None:
                as_bytes(stored).index_copy_(0, targets_R, as_bytes(stored).index_select(0, sources_R))

    def _encoded(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        stored = self._stored
        if stored not in LARGEST:
            return states.to(stored), None
        wide = states.float()
        scales = wide.abs().amax(dim=-1) / LARGEST[stored]
        # a zero vector keeps scale 0; a NaN or infinity makes the scale non-finite and so stays visible
        cells = wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        return (cells.round() if stored is torch.int8 else cells).to(stored), scales

    def _decoded(self, cells: Tensor, scales: Tensor | None) -> Tensor:
        return cells.to(self.dtype) if scales is None else (cells.float() * scales[..., None]).to(self.dtype)


def bytes_per_token(shape: Shape, kind: str, dtype: torch.dtype) -> int:
    """Bytes of keys and values per token in all layers, scales included."""
    stored = STORED.get(kind, dtype)
    vectors = (shape.head_size + shape.value_size) * stored.itemsize + 2 * SCALE_BYTES * (stored in LARGEST)
    return int(shape.layers * shape.kv_heads * vectors)


def _zeros(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU memory is committed only when it is first written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.int8)).view(dtype).view(size)
    return zeros(size, dtype, device)


SCRATCH = 0  # owned by no row: unwanted tokens are written there


class Blocks:
    """Blocks 1 to `capacity`, each free or held by one or more owners.

    The numbers handed out depend only on the calls made so far, and released numbers are reused first, so that memory
    never touched stays uncommitted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._owners: dict[int, int] = {}
        self._released: list[int] = []
        self._unused = 1  # the lowest number never handed out

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self.capacity - len(self._owners)

    def take(self, count: int) -> list[int]:
        """Blocks with one owner each; ValueError when fewer are free."""
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} are free")
        reused = [self._released.pop() for _ in range(min(count, len(self._released)))]
        first, self._unused = self._unused, self._unused + count - len(reused)
        taken = [*reused, *range(first, self._unused)]
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these; ValueError for a free block."""
        for block in blocks:
            self._owners[block] = self._owned(block) + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each of these; a block without owners is free. ValueError for a free block."""
        for block in blocks:
            owners = self._owned(block)
            if owners > 1:
                self._owners[block] = owners - 1
            else:
                del self._owners[block]
                self._released.append(block)

    def _owned(self, block: int) -> int:
        owners = self._owners.get(block)
        if owners is None:
            raise ValueError(f"block {block} is not in use")
        return owners
