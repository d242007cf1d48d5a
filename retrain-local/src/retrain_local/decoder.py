"""The contract between the model and those who run it: sampling and training know no more of a model than this.

Tokens of many rows stand one after another in one packed row of N tokens; there is no batch axis and no padding. What
a token may look at, and where keys and values are kept, is the business of `Attend`, which every forward pass is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder. `context` is the longest row that it has positions for, None if it does not say.

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
        """What each token gathers, [N, heads, value_size]; query head h reads key head h // (heads // kv_heads)."""


class Decoder(Protocol):
    """A causal language model, frozen but for its adapter, in evaluation mode."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """What the head reads, [N, hidden]: normalised hidden states after each of the packed tokens."""

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Logits [M, vocabulary] of any chosen hidden states, with all that the architecture does behind its head."""


class TrainedDecoder(Decoder, Protocol):
    """The decoder whose adapter is trained: `hidden` and `logits` are differentiable with respect to it.

    With `recompute` a layer keeps its input alone and is computed again in the backward pass; the gradient is the same.
    """

    recompute: bool

    def compile(self) -> None:
        """Fuse what stands between matrix products with torch.compile; ConfigError where that cannot be done."""
