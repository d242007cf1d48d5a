"""The contract between a model and its callers, sampling and training.

The tokens of many rows are packed into one row of N tokens, with no batch axis and no padding. `Attend`, passed to
every forward pass, decides which tokens a token attends to and where keys and values are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from retrain_local.memory.sizes import Activations

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySize:
    """Sizes of a token's keys and values in one layer."""

    kv_heads: int
    head_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder; `inner`: width of the feed-forward layer, `context`: longest row, if known.

    `keeping` are the layers with keys and values, where these are fewer than all or differ; the other sizes of heads
    are then the largest. `row_bytes` is the other state of a row. `token_bytes`, if given, is the size of a token in
    the model's own cache. `activations` measures modules of transformers when packs are first planned. `has_chunks`:
    some layers attend within chunks. `is_fused`: kernels between the products keep nothing that they can compute again.
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    hidden: int
    inner: int
    vocabulary: int
    context: int | None
    parameters: int
    keeping: tuple[KeySize, ...] | None = None
    row_bytes: int = 0
    token_bytes: int | None = None
    activations: Callable[[], Activations] | None = None
    has_chunks: bool = False
    is_fused: bool = False

    @property
    def key_sizes(self) -> tuple[KeySize, ...]:
        """The sizes of each layer that keeps keys and values, in order."""
        if self.keeping is not None:
            return self.keeping
        size = KeySize(kv_heads=self.kv_heads, head_size=self.head_size, value_size=self.value_size)
        return (size,) * self.layers

    @property
    def token_elements(self) -> int:
        """The numbers in a token's keys and values, of all layers; 0 in the tier plain."""
        return sum(size.kv_heads * (size.head_size + size.value_size) for size in self.key_sizes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Attention weights of a layer: softmax over the visible keys of `scale` q.k.

    `window` > 0 bounds the number of keys that a token sees, itself included. `chunk` cuts the row into chunks of so
    many positions, and a token sees only keys of its chunk. `softcap` c bounds scores to c tanh(s / c), and `sinks_H`
    adds one key per head with that score and no value.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Attend(Protocol):
    """Attention of one forward pass over N packed tokens."""

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        """Return the output of each token, [N, heads, value_size]; query head h reads key h // (heads // kv_heads)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """The place of keys and values of one token per row: cells [slots, kv_heads, size], at `slots_B`."""

    keys_SKD: Tensor
    values_SKD: Tensor
    slots_B: Tensor


@runtime_checkable
class PagedAttend(Attend, Protocol):
    """`Attend` of one token per row whose caller may store keys and values itself."""

    def target(self, layer: int) -> Target | None:
        """Return the place of this layer's keys and values; None if they have to be converted first."""

    def read(self, layer: int, queries_NHD: Tensor, scores: Scores) -> Tensor:
        """Return the attention over the stored ones, [N, heads, value_size]."""


class Decoder(Protocol):
    """A causal language model in evaluation mode; everything but its adapter is frozen.

    `tier`: "native", "paged" or "plain", the model's own forward pass (see `model.plain`). `mixers` are the layers with
    other state than keys and values (see `model.states`), if any. `routers` choose a mixture's experts (see
    `model.experts`), if they can be observed.
    """

    tier: str
    mixers: Any
    routers: Any
    shape: Shape
    device: torch.device
    dtype: torch.dtype

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Return the input of the head, [N, hidden]: the normalised hidden state after each of the packed tokens."""

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Return logits [M, vocabulary] of selected hidden states, with soft-capping and scaling after the head."""


class TrainedDecoder(Decoder, Protocol):
    """The decoder whose adapter is trained: `hidden` and `logits` are differentiable with respect to it.

    With `recompute` (gradient checkpointing) a layer stores only its input and is recomputed in the backward pass; the
    gradient is the same. `is_ordered`: apart from `Attend`, nothing sums in arbitrary order on CUDA. `is_reentrant`:
    several threads may compute with it at once.
    `head_parameters` are the trained tensors that `logits` reads, empty for an adapter.
    """

    recompute: bool
    is_ordered: bool
    is_reentrant: bool
    head_parameters: tuple[nn.Parameter, ...]

    def packed(self, attend: Callable[..., Attend]) -> Callable[..., Attend]:
        """Return the `Attend` factory for packed rows of this decoder; `attend` is the one for its attention."""

    def keep_reference(self) -> None:
        """Make the current adapter the reference, instead of the base model."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute the reference within the block, bit for bit; take no gradient there."""


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a variable of the forward passes of this thread; transformers' modules pass no argument of ours on."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
