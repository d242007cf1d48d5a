"""Attention that a model of transformers writes out itself, in place of the function that others call by name.

The cache hands out keys and values marked. A product with marked keys gives `Weights` without numbers; their
scaling is noted, and after a softmax their product with marked values is computed by an `Attend`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.decoder import Attend, Scores

PRODUCTS = frozenset({"matmul", "bmm", "baddbmm"})
DIVISIONS, FACTORS = frozenset({"div", "truediv", "itruediv"}), frozenset({"mul", "imul"})
# These change neither the numbers nor, in evaluation mode, anything but the shape and the dtype.
SAME = frozenset({"view", "reshape", "to", "float", "type_as", "contiguous", "dropout", "max"})

READS = frozenset({"get", "size", "dim", "getitem", "to", "bool"})  # of a mask


class UnsupportedAttentionError(Exception):
    """The architecture needs something that `Attend` does not provide."""


class Passage:
    """The part of a cache that leads to an `Attend`; it numbers the calls of attention in a forward pass."""

    attend: Attend
    positions_N: Tensor
    calls = 0

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return the attention of tensors [1, heads, N, size] as [N, heads, size]."""
        number, self.calls = self.calls, self.calls + 1
        q_NHD, k_NKD, v_NKD = (x.as_subclass(Tensor)[0].transpose(0, 1) for x in (query, key, value))
        return self.attend(number, q_NHD, k_NKD, v_NKD, scores)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # a cache of transformers without a layer of attention raises an error

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return max(2, query_length), 0  # two positions show the slope of a bias


# Of the layer that is being computed in this thread.
PASSAGE: ContextVar[Passage | None] = ContextVar("passage", default=None)


class Mask(Tensor):  # type: ignore[misc]
    """A causal mask of transformers, without numbers; tokens see `window` keys back, or their `chunk`."""

    window: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, *, q_length: int, mask_function: Any, use_vmap: bool, local_size: Any = None, **_: Any) -> Mask | None:
        """Replace the function of transformers that makes masks."""
        if use_vmap:
            raise UnsupportedAttentionError("it builds its own attention masks")

        def sees(query: int, key: int) -> bool:
            return bool(mask_function(*torch.tensor([0, 0, query, key])))

        if sees(0, 1):
            return None
        made: Mask = torch.empty((1, 1, q_length, q_length), device="meta").as_subclass(cls)
        if local_size is not None:
            setattr(made, "window" if sees(local_size, 1) else "chunk", local_size)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.strip("_") not in READS:
            raise UnsupportedAttentionError("it builds its own attention masks")
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Mask):
            made.__dict__.update(args[0].__dict__)
        return made


class Marked(Tensor):  # type: ignore[misc]
    """Keys or values of the cache, and tensors made of them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(value for value in (kwargs or {}).values() if isinstance(value, Tensor)))
        if func.__name__.strip("_") not in PRODUCTS or not isinstance(given[-1], Marked):
            return super().__torch_function__(func, types, args, kwargs or {})
        *bias, left, right = given
        if isinstance(left, Weights):
            return left.times(right)
        made = torch.empty((*left.shape[:-1], right.shape[-1]), dtype=left.dtype, device="meta").as_subclass(Weights)
        made.query, made.keys, made.scale = left, right, (kwargs or {}).get("alpha", 1.0)
        return made + bias[0] if bias else made


class Weights(Tensor):  # type: ignore[misc]
    """Products of queries and keys by their shape: `query` [..., N, size], `keys` [..., size, N], times `scale`.

    `bias` is added for each head and key, linear in the position of the key (or zero, for each query); `window` is the
    mask's.
    """

    query: Tensor
    keys: Tensor
    scale: float
    bias: Tensor | None = None
    window: int | None = None
    is_normal = False

    def __add__(self, other: Tensor | None) -> Weights:
        if isinstance(other, Mask):
            self.window = self.window or other.window
        elif other is not None:
            self.bias = other
        return self

    def times(self, values: Tensor) -> Tensor:
        """Return the attention of the passage."""
        passage = PASSAGE.get()
        if passage is None or not self.is_normal:
            raise UnsupportedAttentionError("it multiplies its values by scores that are not normalised")
        q, k, v = (x.reshape(1, -1, *x.shape[-2:]) for x in (self.query, self.keys.mT, values))
        q, k = (x.to(v.dtype) for x in (q, k))
        if self.bias is not None and self.bias.shape[-2] == 1 < self.bias.shape[-1]:
            slopes_H = self.bias[..., 1].sub(self.bias[..., 0]).flatten()
            # Another part of the head, padded to eight: 256 and 1 times the slope by the position in base 256,
            # exact in bf16.
            at_N2 = torch.stack([passage.positions_N // 256, passage.positions_N % 256], dim=1)
            parts_H2 = torch.stack([256 * slopes_H, slopes_H], dim=1) / self.scale
            more = parts_H2[None, :, None].expand(1, -1, q.shape[2], 2), at_N2.expand(1, k.shape[1], -1, 2)
            q, k = (
                torch.cat([x, functional.pad(y, (0, 6)).to(v.dtype)], dim=3) for x, y in zip((q, k), more, strict=True)
            )
        out_NHD = passage.attended(q, k, v, Scores(scale=self.scale, window=self.window))
        return out_NHD.transpose(0, 1).reshape(*self.shape[:-1], v.shape[3])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.__name__.strip("_"), kwargs or {}
        if name in PRODUCTS and isinstance(args[-1], Marked):
            return Marked.__torch_function__(func, types, args, given)
        first, *others = args
        if name == "where":
            # A mask is part of a square buffer, whose last row shows the window. Reading it waits for a GPU.
            pattern = first if first._base is None else first._base
            if not hasattr(pattern, "window"):
                count = int(pattern[..., -1, :].sum())
                pattern.window = None if count == pattern.shape[-1] else count
            others[0].window = pattern.window
            return others[0]
        if name == "masked_fill":
            return first + others[0]
        made = super().__torch_function__(func, types, args, given)
        if not isinstance(made, Weights):
            return made
        made.__dict__.update(first.__dict__)
        if name == "softmax":
            made.is_normal = True
        elif name in DIVISIONS | FACTORS and isinstance(others[0], (int, float)) and not made.is_normal:
            factor = 1 / others[0] if name in DIVISIONS else others[0]
            made.scale, made.bias = made.scale * factor, None if made.bias is None else made.bias * factor
        elif name not in SAME:
            raise UnsupportedAttentionError(f"it changes its attention by {name}")
        return made
