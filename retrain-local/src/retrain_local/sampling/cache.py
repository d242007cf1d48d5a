"""The memory of sampling: the pool of keys and values, owners of its blocks, and finished rows kept as prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.api import Tokens
from retrain_local.attention.pages import LARGEST, STORED, Pages, as_bytes, zeros
from retrain_local.decoder import Decoder, Shape
from retrain_local.memory.limits import free_bytes
from retrain_local.memory.sizes import BLOCK_SIZE, CACHE_BYTES_CPU, CACHE_SHARE_GPU, token_bytes
from retrain_local.model.states import States


class Pool:
    """Per layer keys [num_blocks, block_size, kv_heads, head_size] and values of the same form; block 0 is scratch.

    `kind` "auto" stores them in the dtype of the model, "bf16" rounds them. "int8" and "fp8" (e4m3) store one fp32
    scale per token and head, [num_blocks, block_size, kv_heads], that maps the vector's largest magnitude to the
    largest number of the storage. Slot s is position s % block_size of block s // block_size. The pool starts as zeros:
    reads beyond the end of a row are masked, so they must be finite.
    """

    def __init__(
        self, shape: Shape, *, tokens: int, block_size: int, kind: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_blocks = 1 + max(1, tokens // block_size)
        self.dtype = dtype
        self._stored = stored = STORED.get(kind, dtype)
        self.layers = []
        for size in shape.key_sizes:
            slots, sizes = (self.num_blocks, block_size, size.kv_heads), (size.head_size, size.value_size)
            cells = (zeros((*slots, each), stored, device) for each in sizes)
            scales = (zeros(slots, torch.float32, device) for _ in sizes if stored in LARGEST)
            self.layers.append(Pages(*cells, *scales))

    @property
    def is_exact(self) -> bool:
        """True if reads return the numbers written, without rounding."""
        return self._stored is self.dtype

    def write(self, layer: int, slots_N: Tensor, keys_NKD: Tensor, values_NKD: Tensor) -> None:
        for states_NKD, (stored, scales) in zip((keys_NKD, values_NKD), self.layers[layer].sides, strict=True):
            cells, scales_NK = self._encoded(states_NKD)
            as_bytes(stored).flatten(0, 1).index_copy_(0, slots_N, as_bytes(cells))
            if scales is not None and scales_NK is not None:
                scales.flatten(0, 1).index_copy_(0, slots_N, scales_NK)

    def read(self, layer: int, slots_RT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values in these slots, [rows, kv_heads, tokens, size] in the model's dtype."""
        heads, found = self.layers[layer].keys.shape[2], []
        vectors = slots_RT[:, None] * heads + torch.arange(heads, device=slots_RT.device)[:, None]
        for stored, scales in self.layers[layer].sides:
            cells = as_bytes(stored).flatten(0, 2).index_select(0, vectors.flatten()).view(stored.dtype)
            taken = None if scales is None else scales.flatten().index_select(0, vectors.flatten())
            found.append(self._decoded(cells, taken).unflatten(0, vectors.shape))
        return found[0], found[1]

    def rounded(self, states_NKD: Tensor) -> Tensor:
        """Return these states as they would be read back."""
        return states_NKD if self.is_exact else self._decoded(*self._encoded(states_NKD))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources or not self.layers:
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
    if shape.token_bytes is not None:
        return shape.token_bytes
    stored = STORED.get(kind, dtype).itemsize
    return sum(token_bytes(1, size.kv_heads, size.head_size + size.value_size, stored) for size in shape.key_sizes)


class Blocks:
    """Blocks 1 to `capacity`, each free or held by one or more owners; block 0 takes unwanted tokens.

    The blocks taken depend only on the calls so far; released ones come first, so that unused memory stays uncommitted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._owners: dict[int, int] = {}
        self._released: list[int] = []
        self._unused = 1  # the lowest number never handed out

    @property
    def free(self) -> int:
        return self.capacity - len(self._owners)

    def is_owned(self, block: int) -> bool:
        return block in self._owners

    def take(self, count: int) -> list[int]:
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} are free")
        reused = [self._released.pop() for _ in range(min(count, len(self._released)))]
        first, self._unused = self._unused, self._unused + count - len(reused)
        taken = [*reused, *range(first, self._unused)]
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
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


# Rows kept of earlier calls: enough for the conversations of many agents that wait for their tools.
KEPT_ROWS = 256
TAIL = 16  # trailing tokens of a prefix that serve as its lookup key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Tokens, the blocks with the keys and values of all but the last, and the slot of the state after these."""

    tokens_T: Tokens
    blocks: list[int]
    slot: int = 0

    @property
    def cached(self) -> int:
        return len(self.tokens_T) - 1


class PrefixCache:
    """Finished rows, prompt and completion, kept until their blocks are needed: the next turn of an episode uses one.

    Only whole rows match, so the computation depends on the requests and not on block boundaries.
    """

    def __init__(self, blocks: Blocks, slots: Blocks | None = None) -> None:
        self._blocks, self._slots = blocks, slots
        self._prefixes: dict[bytes, Prefix] = {}  # oldest first
        self._by_tail: dict[tuple[int, bytes], list[Prefix]] = {}  # by length and last tokens

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        key = prefix.tokens_T.tobytes()
        if key in self._prefixes:
            self._release(prefix)
            return
        self._prefixes[key] = prefix
        self._by_tail.setdefault(_tail(prefix.tokens_T), []).append(prefix)

    def longest(self, prompt_T: Tokens) -> Prefix | None:
        for length in sorted({length for length, _ in self._by_tail if length <= len(prompt_T)}, reverse=True):
            for prefix in self._by_tail.get(_tail(prompt_T[:length]), ()):
                if np.array_equal(prefix.tokens_T, prompt_T[:length]):
                    return prefix
        return None

    def drop_oldest(self) -> bool:
        """Release the blocks of the oldest row; False without rows."""
        if not self._prefixes:
            return False
        prefix = self._prefixes.pop(next(iter(self._prefixes)))
        tail = _tail(prefix.tokens_T)
        self._by_tail[tail].remove(prefix)
        if not self._by_tail[tail]:
            del self._by_tail[tail]
        self._release(prefix)
        return True

    def keep_youngest(self, count: int) -> None:
        while len(self) > count:
            self.drop_oldest()

    def _release(self, prefix: Prefix) -> None:
        self._blocks.release(prefix.blocks)
        if self._slots is not None:
            self._slots.release([prefix.slot])


def _tail(tokens_T: Tokens) -> tuple[int, bytes]:
    return len(tokens_T), tokens_T[-TAIL:].tobytes()


class Cache:
    """A pool for `tokens` tokens, the owners of its blocks, and finished rows kept for their prefixes.

    A model with other state has as many `slots` for it, a model of the plain tier its own caches by slot.
    """

    def __init__(self, decoder: Decoder, tokens: int, kind: str, slots: int = 0) -> None:
        self.tokens, self.num_slots = tokens, slots
        place = {"dtype": decoder.dtype, "device": decoder.device}
        self.pool = Pool(decoder.shape, tokens=tokens, block_size=BLOCK_SIZE, kind=kind, **place)
        self.blocks = Blocks(self.pool.num_blocks - 1)
        self.slots = Blocks(slots) if slots else None
        self.states = States(decoder.mixers, slots + 1, decoder.device) if decoder.mixers else None
        self.kept: dict[int, Any] = {}
        self.prefixes = PrefixCache(self.blocks, self.slots)


UNBOUNDED = 2**31
MOST_SLOTS = 4096  # rows at once; more would not be faster on any device


def budget_tokens(decoder: Decoder, kind: str, cache_bytes: int | None, *, is_copied: bool) -> int:
    """Return the tokens that a pool of `cache_bytes` (None: most free memory) can hold; `is_copied`: half."""
    given = _cache_bytes(decoder, cache_bytes)
    # A copy takes half of it, and states half of the rest.
    share = (2 if is_copied else 1) * (2 if decoder.mixers else 1)
    return max(BLOCK_SIZE, given // share // max(1, bytes_per_token(decoder.shape, kind, decoder.dtype)))


def budget_slots(decoder: Decoder, cache_bytes: int | None) -> int:
    """Return the rows whose state can be kept; 0 for a model without any."""
    if decoder.tier == "plain":
        return UNBOUNDED
    if not decoder.mixers:
        return 0
    return max(2, min(MOST_SLOTS, _cache_bytes(decoder, cache_bytes) // 2 // max(1, decoder.shape.row_bytes)))


def _cache_bytes(decoder: Decoder, cache_bytes: int | None) -> int:
    if cache_bytes is not None:
        return cache_bytes
    return int(CACHE_SHARE_GPU * free_bytes(decoder.device)) if decoder.device.type == "cuda" else CACHE_BYTES_CPU
