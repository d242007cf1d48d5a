"""Linear projections with the adapter applied: differentiable for training, without a gradient for sampling."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.memory.sizes import MERGE_LIMIT as MERGE_LIMIT
from retrain_local.model.adapter import Adapter, merge
from retrain_local.model.prepacked import frozen_matrix, own_matrix
from retrain_local.model.weights import Linear


class Projection(Protocol):
    """A fused linear layer of a decoder."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, sum of outputs]."""


class Sampled(Projection, Protocol):
    """A projection that sampling uses."""

    def take(self, adapter: Adapter) -> None:
        """Use these matrices from now on; copied in place, so that CUDA graphs see them."""


class Trained:
    """A projection with its adapter. `is_reference`: with the one kept as reference, or x W^T as if B were zero."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._reference: Adapter | None = None
        self.is_reference = False

    def keep_reference(self) -> None:
        """Make the adapter as it is now the reference."""
        self._reference = self._adapter.copied()

    def __call__(self, x_NI: Tensor) -> Tensor:
        adapter = self._reference if self.is_reference else self._adapter
        if adapter is None:
            linear = self._adapter.linear
            return functional.linear(x_NI, linear.weight, linear.bias)
        return self._adapted(x_NI, adapter)

    def _adapted(self, x_NI: Tensor, adapter: Adapter) -> Tensor:
        raise NotImplementedError


class TrainedMerged(Trained):
    """x (W + scale B A)^T. The gradients of A and B use products of their rank only."""

    def _adapted(self, x_NI: Tensor, adapter: Adapter) -> Tensor:
        if not torch.is_grad_enabled():
            weight = adapter.linear.weight
            return functional.linear(x_NI, merge(adapter, weight, torch.empty_like(weight)), adapter.linear.bias)
        y_NO: Tensor = _Merged.apply(x_NI, adapter, *adapter.parts_a, *adapter.parts_b)
        return y_NO


class TrainedLowRank(Trained):
    """x W^T + (x A^T) (scale B)^T in the dtype of W, which keeps an update that rounding of W + BA would lose."""

    def _adapted(self, x_NI: Tensor, adapter: Adapter) -> Tensor:
        y_NO: Tensor = _LowRank.apply(x_NI, adapter, *adapter.parts_a, *adapter.parts_b)
        return y_NO


class SampledMerged:
    """x W'^T with W' = W + scale B A as last published, recomputed from W each time: rounding does not accumulate."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._merged = own_matrix(linear.weight)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._merged.linear(x_NI, self._linear.bias)

    def take(self, adapter: Adapter) -> None:
        weight = self._linear.weight
        self._merged.take(merge(adapter, weight, torch.empty_like(weight)))


class SampledLowRank:
    """x W^T + (x A^T) (scale B)^T with shared W: two products more for all parts, B being block-diagonal."""

    def __init__(self, linear: Linear, rank: int, *, may_copy: bool = True, expands: bool = False) -> None:
        """`may_copy`: whether W may be prepacked, which takes its size again where others hold the tensor.

        With `expands` W is taken from `linear` at each use, for one that makes it from fewer bits.
        """
        self._bias, self._source = linear.bias, linear if expands else None
        if not expands:
            self._frozen = frozen_matrix(linear.weight, may_copy=may_copy)
        parts, weight = len(linear.sizes), linear.weight
        self._a = weight.new_zeros(parts * rank, weight.shape[1])
        self._b = weight.new_zeros(weight.shape[0], parts * rank)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._source is not None:
            y_NO = functional.linear(x_NI, self._source.weight, self._bias)
        else:
            y_NO = self._frozen.linear(x_NI, self._bias)
        return y_NO.addmm_(x_NI @ self._a.T, self._b.T)

    def take(self, adapter: Adapter) -> None:
        self._a.copy_(adapter.a)
        spread(adapter, self._b)


def spread(adapter: Adapter, out: Tensor) -> None:
    """Write scale B of every part into its rows of `out` [sum of outputs, parts x rank], and its own columns."""
    rows, columns = out.split(adapter.linear.sizes), range(0, out.shape[1], adapter.rank)
    for block, at, b in zip(rows, columns, adapter.parts_b, strict=True):
        block[:, at : at + adapter.rank].copy_(scaled(b, adapter, out.dtype))


def scaled(b: Tensor, adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """scale B in the dtype of the product, so that both sides round at the same point."""
    return (b.detach() * adapter.scale).to(dtype)


class _Merged(torch.autograd.Function):  # type: ignore[misc]
    """Stores only x for the backward pass.

    There W' is made again, which costs rank / N of a product with it, or, for fewer rows than outputs, B and A are
    multiplied one after the other, for the gradients of A and B need the first product anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, adapter: Adapter, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.adapter = adapter
        linear = adapter.linear
        return functional.linear(x, merge(adapter, linear.weight, torch.empty_like(linear.weight)), linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), adapter, g = ctx.saved_tensors, ctx.adapter, gradients[0]
        weight = adapter.linear.weight
        g_inner, of_parts = _adapter_gradients(x, x @ adapter.a.T, g, adapter.b * adapter.scale, adapter)
        if not ctx.needs_input_grad[0]:
            return None, None, *of_parts
        if len(g) < len(weight):
            return (g @ weight).addmm_(g_inner, adapter.a), None, *of_parts
        return g @ merge(adapter, weight, torch.empty_like(weight)), None, *of_parts


class _LowRank(torch.autograd.Function):  # type: ignore[misc]
    """Stores x and x A^T for the backward pass.

    Of a layer of Qwen3-4B at rank 32 the second is 224 numbers a token beside 72,000 activations; made again it would
    read x once more, a tenth of what all products with A and B read and write (218,000 numbers a token).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, adapter: Adapter, *parts: Tensor) -> Tensor:
        linear, rank = adapter.linear, adapter.rank
        y = functional.linear(x, linear.weight, linear.bias)
        inner = x @ adapter.a.to(x.dtype).T
        ctx.save_for_backward(x, inner)
        ctx.adapter = adapter
        scaled_b = scaled(adapter.b, adapter, x.dtype)
        parts_of = zip(
            y.split(linear.sizes, dim=1), inner.split(rank, dim=1), scaled_b.split(linear.sizes), strict=True
        )
        for part, inside, b in parts_of:
            part.addmm_(inside, b.T)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x, inner), adapter, g = ctx.saved_tensors, ctx.adapter, gradients[0]
        a, scaled_b = adapter.a.to(x.dtype), scaled(adapter.b, adapter, x.dtype)
        g_inner, of_parts = _adapter_gradients(x, inner, g, scaled_b, adapter)
        g_x = (g @ adapter.linear.weight).addmm_(g_inner, a) if ctx.needs_input_grad[0] else None
        return g_x, None, *of_parts


def _adapter_gradients(
    x: Tensor, inner: Tensor, g: Tensor, scaled_b: Tensor, adapter: Adapter
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradient of `inner`, which is x A^T, [N, parts x rank], and those of every A, then of every B."""
    sizes, rank = adapter.linear.sizes, adapter.rank
    g_inner = torch.empty_like(inner)
    g_b = adapter.b.new_empty(adapter.b.shape)
    parts = zip(
        g.split(sizes, dim=1),
        inner.split(rank, dim=1),
        g_inner.split(rank, dim=1),
        scaled_b.split(sizes),
        g_b.split(sizes),
        strict=True,
    )
    for of_y, inside, of_inside, b, of_b in parts:
        torch.mm(of_y, b, out=of_inside)
        of_b.copy_(of_y.T @ inside)
    g_a = (g_inner.T @ x).to(adapter.a.dtype)
    return g_inner, (*g_a.split(rank), *g_b.mul_(adapter.scale).split(sizes))
