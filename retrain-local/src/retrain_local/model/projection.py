"""Linear projections with the adapter applied: differentiable for training, without a gradient for sampling.

At the top matrices without an adapter, some in the layout that oneDNN multiplies by.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.memory.sizes import PREPACK_FROM
from retrain_local.model.adapter import Adapter, merged
from retrain_local.model.weights import Linear

# Rows of x that the layout is chosen for. On the CPUs measured it is the fastest layout for any number of rows.
LAYOUT_ROWS = 32
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest element of a product


class Matrix(Protocol):
    """A matrix W [outputs, inputs] that rows are multiplied by; no gradient flows through it."""

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + bias, [N, outputs] in x's dtype."""

    def take(self, weight_OI: Tensor) -> None:
        """Hold these numbers from now on."""


class Plain:
    """The caller's tensor itself, rounded to the dtype of the rows."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(x_NI, self._weight_OI.detach().to(x_NI.dtype), bias_O)

    def take(self, weight_OI: Tensor) -> None:
        self._weight_OI.copy_(weight_OI)  # in place, so that CUDA graphs see it


class Prepacked:
    """A copy in oneDNN's blocked layout, as large as the matrix; with 8 to 32 rows its product takes half the time."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.take(weight_OI)

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return _by_onednn(x_NI, self._packed, bias_O)

    def take(self, weight_OI: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), LAYOUT_ROWS)


def frozen_matrix(weight_OI: Tensor, *, may_copy: bool = True) -> Matrix:
    """Return the tensor as a matrix, or a prepacked copy of it if `may_copy` and the copy is worth its memory."""
    is_worth_it = weight_OI.device.type == "cpu" and weight_OI.numel() >= PREPACK_FROM
    return Prepacked(weight_OI) if may_copy and is_worth_it and can_prepack(weight_OI.dtype) else Plain(weight_OI)


def own_matrix(weight_OI: Tensor) -> Matrix:
    found = frozen_matrix(weight_OI)
    return Plain(weight_OI.clone()) if isinstance(found, Plain) else found


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """True if oneDNN's product of a prepacked matrix works here; measured to be faster on x86 only."""
    if dtype not in TOLERANCE or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    weight_OI = torch.arange(48 * 32, dtype=torch.float32).mul_(1.7).sin_().view(48, 32).to(dtype)
    x_NI = torch.arange(3 * 32, dtype=torch.float32).cos_().view(3, 32).to(dtype)
    bias_O = weight_OI[:, 0].contiguous()
    wanted_NO = functional.linear(x_NI.float(), weight_OI.float(), bias_O.float())
    try:
        with torch.no_grad():
            found_NO = Prepacked(weight_OI).linear(x_NI, bias_O).float()
            back_NI = _by_onednn(found_NO.to(dtype), weight_OI.T).float()
    # PyTorch without oneDNN, or a CPU that oneDNN does not support.
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    pairs = (found_NO, wanted_NO), (back_NI, wanted_NO @ weight_OI.float())
    return all(bool((found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()) for found, wanted in pairs)


def times(g_NO: Tensor, weight_OI: Tensor) -> Tensor:
    """g W without a gradient. In fp32 oneDNN reads W where it lies, and takes 0.85 to 0.95 of MKL's time (AMD EPYC)."""
    is_worth_it = g_NO.device.type == "cpu" and weight_OI.numel() >= PREPACK_FROM and weight_OI.dtype == torch.float32
    return _by_onednn(g_NO, weight_OI.T) if is_worth_it and can_prepack(torch.float32) else g_NO @ weight_OI


def _by_onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


class Frozen(torch.autograd.Function):  # type: ignore[misc]
    """x W^T by `matrix`, a layout of W, with a gradient for x."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, matrix: Matrix, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return matrix.linear(x_NI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight_OI,) = ctx.saved_tensors
        return times(gradients[0], weight_OI.to(gradients[0].dtype)), None, None


class Projection(Protocol):
    """A fused linear layer of a decoder."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, sum of outputs]."""


class Sampled(Projection, Protocol):
    """A projection that sampling uses."""

    def take(self, adapter: Adapter) -> None:
        """Copy these matrices in place, where CUDA graphs read them."""


class Trained:
    """A projection with its adapter, or if `is_reference` with the adapter kept as reference (none: B = 0)."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._reference: Adapter | None = None
        self.is_reference = False

    @property
    def current(self) -> Adapter | None:
        return self._reference if self.is_reference else self._adapter

    def keep_reference(self) -> None:
        self._reference = self._adapter.copied()

    def __call__(self, x_NI: Tensor) -> Tensor:
        adapter = self.current
        if adapter is None:
            linear = self._adapter.linear
            return functional.linear(x_NI, linear.weight, linear.bias)
        return self._adapted(x_NI, adapter)

    def _adapted(self, x_NI: Tensor, adapter: Adapter) -> Tensor:
        raise NotImplementedError


class TrainedMerged(Trained):
    """x (W + scale B A)^T. The gradients of A and B use products of their rank only.

    The product is that of `shared`, the sampler's own copy, while it holds these numbers.
    """

    shared: SampledMerged | None = None

    def _adapted(self, x_NI: Tensor, adapter: Adapter) -> Tensor:
        if self.shared is not None and self.shared.holds(adapter):
            matrix = self.shared.matrix
        else:
            matrix = Plain(merged(adapter, adapter.linear.weight))
        if not torch.is_grad_enabled():
            return matrix.linear(x_NI, adapter.linear.bias)
        return _Merged.apply(x_NI, adapter, matrix, *adapter.parts_a, *adapter.parts_b)


class TrainedLowRank(Trained):
    """x W^T + (x A^T) (scale B)^T in the dtype of W, to keep an update that rounding of W + BA would lose.

    `shared` is the sampler's copy of W, if it has one in a faster layout.
    """

    shared: Matrix | None = None

    def _adapted(self, x_NI: Tensor, adapter: Adapter) -> Tensor:
        return _LowRank.apply(x_NI, adapter, self.shared, *adapter.parts_a, *adapter.parts_b)

    def gated(self, x_NI: Tensor, adapter: Adapter, gates: Gates) -> Tensor:
        """Return silu(gate) * up of the product; kernels that read it add the adapter's share."""
        y_NO, inner_NR = _Apart.apply(x_NI, adapter, *adapter.parts_a)
        return _Gated.apply(y_NO, inner_NR, adapter, gates, *adapter.parts_b)


class SampledMerged:
    """x W'^T with W' = W + scale B A as last published, recomputed from W each time: rounding does not accumulate."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.matrix = own_matrix(linear.weight)
        self._taken: tuple[Adapter, tuple[int, ...]] | None = None

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self.matrix.linear(x_NI, self._linear.bias)

    def take(self, adapter: Adapter) -> None:
        self.matrix.take(merged(adapter, self._linear.weight))
        self._taken = adapter, _writes(adapter)

    def holds(self, adapter: Adapter) -> bool:
        """True if `take` had this adapter, and nothing wrote to its matrices since."""
        return self._taken is not None and self._taken[0] is adapter and self._taken[1] == _writes(adapter)


def _writes(adapter: Adapter) -> tuple[int, ...]:
    # PyTorch counts them, to refuse a backward pass over changed tensors
    return tuple(part._version for part in (*adapter.parts_a, *adapter.parts_b))


class SampledLowRank:
    """x W^T + (x A^T) (scale B)^T with shared W: two more products for all parts, since B is block-diagonal.

    `may_copy` allows a prepacked copy of W. `expands` reads W from `linear` at each use, for a quantised one.
    """

    def __init__(self, linear: Linear, rank: int, *, may_copy: bool = True, expands: bool = False) -> None:
        self.expands, self._bias, self._source = expands, linear.bias, linear if expands else None
        if not expands:
            self.frozen = frozen_matrix(linear.weight, may_copy=may_copy)
        parts, weight = len(linear.sizes), linear.weight
        self._a = weight.new_zeros(parts * rank, weight.shape[1])
        self._b = weight.new_zeros(weight.shape[0], parts * rank)

    def __call__(self, x_NI: Tensor) -> Tensor:
        frozen = Plain(self._source.weight) if self._source is not None else self.frozen
        y_NO = frozen.linear(x_NI, self._bias)
        return y_NO.addmm_(x_NI @ self._a.T, self._b.T)

    def take(self, adapter: Adapter) -> None:
        self._a.copy_(adapter.a)
        rows, columns = self._b.split(adapter.linear.sizes), range(0, self._b.shape[1], adapter.rank)
        for block, at, b in zip(rows, columns, adapter.parts_b, strict=True):
            block[:, at : at + adapter.rank].copy_(_scaled(b, adapter, self._b.dtype))


def _scaled(b: Tensor, adapter: Adapter, dtype: torch.dtype) -> Tensor:
    # rounded to the dtype of the product, so that trainer and sampler round at the same point
    return (b.detach() * adapter.scale).to(dtype)


class _Merged(torch.autograd.Function):  # type: ignore[misc]
    """Stores only x: the backward pass computes W' again, for rank / N of a product with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adapter: Adapter, matrix: Matrix, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.adapter = adapter
        return matrix.linear(x, adapter.linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), adapter, g = ctx.saved_tensors, ctx.adapter, gradients[0]
        weight = adapter.linear.weight
        g_inner, of_parts = _adapter_gradients(x, x @ adapter.a.T, g, adapter.b * adapter.scale, adapter)
        if not ctx.needs_input_grad[0]:
            return None, None, None, *of_parts
        # With fewer rows than outputs this is cheaper than merging, and the gradients of A and B need `g_inner` anyway.
        if len(g) < len(weight):
            return times(g, weight).addmm_(g_inner, adapter.a), None, None, *of_parts
        return times(g, merged(adapter, weight)), None, None, *of_parts


class _LowRank(torch.autograd.Function):  # type: ignore[misc]
    """Stores x and x A^T for the backward pass.

    In a layer of Qwen3-4B at rank 32 the second takes 224 numbers a token next to 72,000 activations. Computing it
    again would read x once more, a tenth of all that products with A and B read and write (218,000 numbers a token).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, adapter: Adapter, shared: Matrix | None, *parts: Tensor) -> Tensor:
        linear = adapter.linear
        y = (shared or Plain(linear.weight)).linear(x, linear.bias)
        inner = x @ adapter.a.to(x.dtype).T
        ctx.save_for_backward(x, inner)
        ctx.adapter = adapter
        scaled_b = _scaled(adapter.b, adapter, x.dtype)
        return LowRankSum(y_NO=y, inner_NR=inner, b_OR=scaled_b, sizes=linear.sizes).total()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x, inner), adapter, g = ctx.saved_tensors, ctx.adapter, gradients[0]
        a, scaled_b = adapter.a.to(x.dtype), _scaled(adapter.b, adapter, x.dtype)
        g_inner, of_parts = _adapter_gradients(x, inner, g, scaled_b, adapter)
        g_x = _input_gradient(g, g_inner, a, adapter.linear.weight) if ctx.needs_input_grad[0] else None
        return g_x, None, None, *of_parts


class _Apart(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + bias and x A^T, not yet added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adapter: Adapter, *parts_a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.adapter = adapter
        return Plain(adapter.linear.weight).linear(x, adapter.linear.bias), x @ adapter.a.to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), adapter, (g, g_inner) = ctx.saved_tensors, ctx.adapter, gradients
        of_parts = (g_inner.T @ x).to(adapter.a.dtype).split(adapter.rank)
        if not ctx.needs_input_grad[0]:
            return None, None, *of_parts
        return _input_gradient(g, g_inner, adapter.a.to(x.dtype), adapter.linear.weight), None, *of_parts


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    """The gates of y + inner (scale B)^T, by kernels that add up what they read."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, inner: Tensor, adapter: Adapter, gates: Gates, *parts_b: Tensor) -> Tensor:
        ctx.save_for_backward(y, inner)
        ctx.adapter, ctx.gates = adapter, gates
        return _Gated.again(ctx, y, inner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (y, inner), adapter = ctx.saved_tensors, ctx.adapter
        product = _sum(y, inner, adapter)
        g = ctx.gates.backward(product, gradients[0])
        g_inner, g_b = _b_gradients(inner, g, product.b_OR, adapter)
        return g, g_inner, None, None, *g_b

    @staticmethod
    def again(ctx: Any, *saved: Tensor) -> Tensor:
        y, inner = saved or ctx.saved_tensors
        gated: Tensor = ctx.gates.forward(_sum(y, inner, ctx.adapter))
        return gated


def _sum(y: Tensor, inner: Tensor, adapter: Adapter) -> LowRankSum:
    scaled_b = _scaled(adapter.b, adapter, y.dtype)
    return LowRankSum(y_NO=y, inner_NR=inner, b_OR=scaled_b, sizes=adapter.linear.sizes)


def _input_gradient(g: Tensor, g_inner: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    if not g.is_cuda:
        return times(g, weight).addmm_(g_inner, a)
    # The product with W is bound by operations and has time to read the sum so far: no second pass over the result.
    return (g_inner @ a).addmm_(g, weight)


def _adapter_gradients(
    x: Tensor, inner: Tensor, g: Tensor, scaled_b: Tensor, adapter: Adapter
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient of `inner` = x A^T, [N, parts x rank], and the gradients of every A, then of every B."""
    g_inner, g_b = _b_gradients(inner, g, scaled_b, adapter)
    g_a = (g_inner.T @ x).to(adapter.a.dtype)
    return g_inner, (*g_a.split(adapter.rank), *g_b)


def _b_gradients(inner: Tensor, g: Tensor, scaled_b: Tensor, adapter: Adapter) -> tuple[Tensor, tuple[Tensor, ...]]:
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
    return g_inner, g_b.mul_(adapter.scale).split(sizes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRankSum:
    """Y + T_p (scale B_p)^T for every part p of a product, before the addition.

    `y_NO` holds the products with the frozen matrices, `inner_NR` the columns T_p = x A_p^T side by side, `b_OR`
    scale B of the parts, [sum of outputs, rank]; `sizes` are the outputs of the parts.
    """

    y_NO: Tensor
    inner_NR: Tensor
    b_OR: Tensor
    sizes: tuple[int, ...]

    def total(self) -> Tensor:
        """Add to `y_NO` in place, one product per part, and return it."""
        parts = zip(
            self.y_NO.split(self.sizes, dim=1),
            self.inner_NR.split(self.b_OR.shape[1], dim=1),
            self.b_OR.split(self.sizes),
            strict=True,
        )
        for part, inner, b in parts:
            part.addmm_(inner, b.T)
        return self.y_NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """silu(gate) * up of a sum of two parts, [N, inner], and from the gradient of that the sum's."""

    forward: Callable[[LowRankSum], Tensor]
    backward: Callable[[LowRankSum, Tensor], Tensor]


@runtime_checkable
class SampledInParts(Sampled, Protocol):
    """A projection that can leave the addition to the kernel that reads its product."""

    rank: int

    def parts(self, x_NI: Tensor) -> LowRankSum: ...


class SampledStacked:
    """x [W; A]^T in one product, with W shared with the trainer and A in the rows below it; then (x A^T) (scale B)^T.

    In decoding a product of few rows costs the reading of its matrix, or a launch. A separate product with A costs a
    launch for 1 % of the bytes of W: 4 of 21 launches of a layer. A fused kernel that reads the product also adds B.
    """

    def __init__(self, linear: Linear, stacked_OI: Tensor, rank: int) -> None:
        self._stacked, self._sizes, outputs = stacked_OI, linear.sizes, len(linear.weight)
        self.rank = rank
        stacked_OI[outputs:].zero_()
        self._a = stacked_OI[outputs : outputs + len(linear.sizes) * rank]
        self._b = linear.weight.new_zeros(outputs, rank)
        self._bias = None
        if linear.bias is not None:
            self._bias = torch.cat([linear.bias, linear.bias.new_zeros(len(stacked_OI) - outputs)])

    def parts(self, x_NI: Tensor) -> LowRankSum:
        outputs = len(self._b)
        product = functional.linear(x_NI, self._stacked, self._bias)
        inner_NR = product[:, outputs : outputs + len(self._a)]
        return LowRankSum(y_NO=product[:, :outputs], inner_NR=inner_NR, b_OR=self._b, sizes=self._sizes)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self.parts(x_NI).total()

    def take(self, adapter: Adapter) -> None:
        self._a.copy_(adapter.a)
        self._b.copy_(_scaled(adapter.b, adapter, self._b.dtype))
