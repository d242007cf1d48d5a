"""The state of layers other than keys and values: convolution windows, gated-delta and Mamba matrices.

Such a layer, a mixer, is a module of transformers. It reads its rows side by side, [rows, tokens, hidden], while the
rest of the model reads them packed, [1, N, hidden]; a `Mix` moves between the two and holds the states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from retrain_local.attention.packed import Spans
from retrain_local.attention.pages import zeros
from retrain_local.attention.rows import Move, WholeRows
from retrain_local.decoder import Attend, Scores

BARE = "is_bare"  # an attribute of the layers of a cache that hold no tensor and that no mixer changes


def mapped(found: Any, change: Move) -> Any:
    """Return a copy of nested containers and cache objects with every tensor changed."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, (list, tuple)) and not hasattr(found, "_fields"):
        return type(found)(mapped(each, change) for each in found)
    if isinstance(found, dict):
        return type(found)((key, mapped(each, change)) for key, each in found.items())
    if isinstance(found, (nn.Module, type)) or hasattr(found, "model_type") or BARE in getattr(found, "__dict__", BARE):
        return found  # a module, a configuration of transformers, a plain value, a layer without a state
    made = copy.copy(found)
    for name, value in vars(found).items():
        made.__dict__[name] = mapped(value, change)
    return made


def tensors_in(found: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(found, note)
    return tensors


def with_tensors(found: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a copy with these tensors in the order of `tensors_in`."""
    given = iter(tensors)
    return mapped(found, lambda _: next(given))


def joined(kept: Sequence[Any]) -> Any:
    """Join the stored states of rows into the state of a batch."""
    parts = zip(*map(tensors_in, kept), strict=True)
    return with_tensors(kept[0], (torch.cat(part) if part[0].dim() else part[0].clone() for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixer:
    """A module by `name`, and a cache of transformers that holds only its state of one row."""

    name: str
    kept: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixers:
    """The mixers of a model, in order; `empty` makes a cache without a state.

    `is_chunked`: they read several tokens from a stored state at once; `is_batched`: they continue several rows at
    once. `is_body`: the only one is the model's body, and it returns its cache.
    """

    layers: tuple[Mixer, ...]
    empty: Callable[[], Any]
    is_chunked: bool = True
    is_batched: bool = True
    is_body: bool = False

    @property
    def row_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in tensors_in(layer.kept))


class States:
    """Slots for the states of rows, [slots, ...] per tensor of each mixer; slot 0 is scratch."""

    def __init__(self, mixers: Mixers, slots: int, device: torch.device) -> None:
        self.mixers, self._device = mixers, device
        self._tensors = [
            [zeros((slots, *each.shape[1:]), each.dtype, device) for each in tensors_in(layer.kept)]
            for layer in mixers.layers
        ]

    def read(self, number: int, slots_B: Tensor) -> Any:
        """Return the cache of these rows."""
        tensors = (stored.index_select(0, slots_B) for stored in self._tensors[number])
        return with_tensors(self.mixers.layers[number].kept, tensors)

    def write(self, number: int, slots_B: Tensor, cache: Any) -> None:
        for stored, tensor in zip(self._tensors[number], tensors_in(cache), strict=True):
            # A count of tokens may be one for all rows.
            stored.index_copy_(0, slots_B, tensor.expand(len(slots_B), *tensor.shape[1:]))

    def clear(self, slots: Sequence[int]) -> None:
        """Zero these slots, for rows that start without an earlier token."""
        if slots:
            slots_R = self.index(slots)
            for stored in (tensor for tensors in self._tensors for tensor in tensors):
                stored.index_fill_(0, slots_R, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            sources_R, targets_R = self.index(sources), self.index(targets)
            for stored in (tensor for tensors in self._tensors for tensor in tensors):
                stored.index_copy_(0, targets_R, stored.index_select(0, sources_R))

    def index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), device=self._device)


class Run(Protocol):
    """Runs a mixer over rows: `move` takes [1, N, ...] to [rows, tokens, ...], `cache` (or None) holds its state."""

    def __call__(self, move: Move, cache: Any) -> Tensor: ...


class Mix(Protocol):
    """Runs mixer `number` over N packed tokens."""

    def __call__(self, number: int, run: Run) -> Tensor:
        """Return the mixer's output, [1, N, hidden]."""


class Mixed:
    """An `Attend` of a model with mixers."""

    def __init__(self, attend: Attend, mix: Mix) -> None:
        self.attend, self.mix = attend, mix

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        return self.attend(layer, queries_NHD, keys_NKD, values_NKD, scores)


class PackedMix:
    """`Mix` of training: every row is read from its first token."""

    def __init__(self, spans: Spans, device: torch.device) -> None:
        self._rows = WholeRows(spans, device)

    def __call__(self, number: int, run: Run) -> Tensor:
        return self._rows.through(lambda move: run(lambda x: move(x[0]), None))[None]


class PromptMix:
    """`Mix` of prompts: `lengths` new tokens per row, from the state in the row's slot if it `continues` one.

    The state after the last token is left in the slot.
    """

    def __init__(self, states: States, slots: Sequence[int], lengths: Sequence[int], *, continues: bool) -> None:
        self._states, self._slots, self._continues = states, slots, continues
        self._starts = [0, *np.cumsum(lengths).tolist()]
        # Rows of one length share a call: padding would enter their states.
        self._calls = [
            ([number for number, each in enumerate(lengths) if each == length], length)
            for length in sorted(set(lengths))
        ]

    def __call__(self, number: int, run: Run) -> Tensor:
        states, mixers, parts = self._states, self._states.mixers, dict[int, Tensor]()
        for rows, length in self._calls:
            slots_B = states.index([self._slots[row] for row in rows])
            cache = states.read(number, slots_B) if self._continues else mixers.empty()
            step = 1 if self._continues and not mixers.is_chunked else length
            outs = []
            for first in range(0, length, step):
                places = [self._starts[row] + first for row in rows]
                outs.append(run(partial(_stacked, places, step), cache))
            states.write(number, slots_B, cache)
            parts |= dict(zip(rows, torch.cat(outs, dim=1), strict=True))
        return torch.cat([parts[row] for row in range(len(parts))])[None]


def _stacked(places: Sequence[int], length: int, x_1N: Tensor) -> Tensor:
    return torch.stack([x_1N[0, place : place + length] for place in places])


class Pieces:
    """A `Mix` that reads a row in pieces, each from the state after the one before it, the first perhaps from zeros."""

    def __init__(self, mixers: Mixers, lengths: Sequence[int], *, from_zeros: bool = False) -> None:
        self._mixers, self._lengths, self._from_zeros = mixers, lengths, from_zeros
        self.kept: dict[int, Any] = {}

    def __call__(self, number: int, run: Run) -> Tensor:
        kept, parts, start = self._mixers.layers[number].kept, [], 0
        self.kept[number] = mapped(kept, torch.zeros_like) if self._from_zeros else self._mixers.empty()
        for length in self._lengths:
            parts.append(run(partial(_stacked, [start], length), self.kept[number]))
            start += length
        return torch.cat(parts, dim=1)


class StepMix:
    """`Mix` of decoding: one token per row and call, over a copy of the states in these slots."""

    def __init__(self, states: States, slots: Sequence[int]) -> None:
        self._states, self._slots_B = states, states.index(slots)
        self._caches: dict[int, Any] = {}

    def __call__(self, number: int, run: Run) -> Tensor:
        if number not in self._caches:
            self._caches[number] = self._states.read(number, self._slots_B)
        # Not `transpose`: its strides would make one product per row of every linear layer.
        return run(lambda x_1N: x_1N[0][:, None], self._caches[number])[:, 0][None]

    def drop(self, kept_B: Tensor) -> None:
        """Keep only these rows."""
        self._slots_B = self._slots_B[kept_B]
        for number, cache in self._caches.items():
            self._caches[number] = mapped(cache, lambda tensor: tensor.index_select(0, kept_B))

    def finish(self) -> None:
        """Store the states in their slots."""
        for number, cache in self._caches.items():
            self._states.write(number, self._slots_B, cache)
