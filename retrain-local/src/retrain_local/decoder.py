"""The contract between a model and its callers: all that sampling and training know about a model.

The tokens of many rows are packed into one row of N tokens, with no batch axis and no padding. `Attend`, passed to
every forward pass, decides which tokens a token attends to and where keys and values are stored.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder. `context` is the longest row that it has positions for, None if unknown.

    Keys are [N, kv_heads, head_size], values [N, kv_heads, value_size]; `inner` is the width of the feed-forward layer.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """How one layer turns queries and keys into weights.

    softmax over the visible keys of `scale` q.k, where `window` > 0 bounds how many keys a token sees, itself included,
    `softcap` c bounds scores to c tanh(s / c), and `sinks_H` adds one key per head with that score and no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Attend(Protocol):
    """Attention of one forward pass over N packed tokens."""

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        """Output of each token, [N, heads, value_size]; query head h reads key head h // (heads // kv_heads)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """Where keys and values of one token per row go: cells [slots, kv_heads, size], at `slots_B`."""

    keys_SKD: Tensor
    values_SKD: Tensor
    slots_B: Tensor


@runtime_checkable
class PagedAttend(Attend, Protocol):
    """`Attend` of one token per row, which can be given its keys and values where they are kept."""

    def target(self, layer: int) -> Target | None:
        """Where this layer's are kept; None if they have to be converted first."""

    def read(self, layer: int, queries_NHD: Tensor, scores: Scores) -> Tensor:
        """Attention over what is kept, [N, heads, value_size]."""


class Decoder(Protocol):
    """A causal language model in evaluation mode; everything but its adapter is frozen."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Input of the head, [N, hidden]: the normalised hidden state after each of the packed tokens."""

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Logits [M, vocabulary] of selected hidden states, with all that the architecture applies after its head."""


class TrainedDecoder(Decoder, Protocol):
    """The decoder whose adapter is trained: `hidden` and `logits` are differentiable with respect to it.

    With `recompute` (gradient checkpointing) a layer stores only its input and is recomputed in the backward pass; the
    gradient is the same. `is_ordered`: nothing but the attention that it is given sums in arbitrary order on CUDA.
    `head_parameters` are the trained tensors that `logits` reads: none where only an adapter is trained.
    """

    recompute: bool
    is_ordered: bool
    head_parameters: tuple[nn.Parameter, ...]

    def keep_reference(self) -> None:
        """Make the adapter as it is now the reference; without a call that is the base model."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Within the block the decoder computes the reference, bit for bit; take no gradient there."""
