"""Operations between the matrix products of a layer (norm, heads, gate), with backward passes of one sweep each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.model.projection import Gates

Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """The number of heads, their rotation, and their norms before it if `norm_HD` is given.

    `cos_N1P` and `sin_N1P` belong to every position's angles, [N, 1, D / 2].
    """

    heads: int
    kv_heads: int
    cos_N1P: Tensor
    sin_N1P: Tensor
    norm_HD: Tensor | None
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32 inside.

    The quotient is rounded to the weight's dtype before the product, as in transformers' modules; x may be wider.
    `weight` has the size of the last axis, or of the last two for separate weights of each head.
    """
    if x.is_cuda:
        return _fused_norm(x, weight, eps)
    if not torch.is_grad_enabled():
        return _normed(x, weight, eps)[0]
    return _RmsNorm.apply(x, weight, eps)


def split_heads(qkv_NHD: Tensor, turn: Turn) -> Heads:
    """Split [N, heads + 2 kv_heads, D] into queries and keys, rotated by their positions, and values."""
    # the pairs (x[p], x[p + D/2]) of a head are rotated by the angle with the given cosine and sine
    is_norm_trained = turn.norm_HD is not None and turn.norm_HD.requires_grad
    if not qkv_NHD.is_cuda and torch.is_grad_enabled() and not is_norm_trained:
        heads: Heads = _SplitHeads.apply(qkv_NHD, turn)
        return heads
    qk, values_NKD = qkv_NHD.split((turn.heads + turn.kv_heads, turn.kv_heads), dim=1)
    if turn.norm_HD is not None:
        qk = rms_norm(qk, turn.norm_HD, turn.eps)
    rotate = _Rotate.apply if torch.is_grad_enabled() else _turned
    queries_NHD, keys_NKD = rotate(qk, turn.cos_N1P, turn.sin_N1P).split((turn.heads, turn.kv_heads), dim=1)
    return queries_NHD, keys_NKD, values_NKD


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of the last axis."""
    return _SwiGlu.apply(gate_up) if torch.is_grad_enabled() else _gated(gate_up)


@contextmanager
def made_again(y: Tensor) -> Iterator[None]:
    """Do not save `y` for the backward pass: there it is computed again from the saved inputs of its operation.

    One element-wise pass each way spares a quarter of a layer's activations. Results are saved of operations without
    `again`, a function of their context.
    """
    node = y.grad_fn
    again = getattr(getattr(node, "_forward_cls", None), "again", None)
    if again is None:
        yield
        return

    # The hooks below would keep y itself alive, so they compare its address.
    address, shape = y.data_ptr(), y.shape

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == address and saved.shape == shape else saved

    def unpack(kept: Tensor | None) -> Tensor:
        return again(node) if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The three operations, and the context in which a product reads the result of `rms_norm` or `swiglu`.

    `gates`, if there are any, take the place of `swiglu` behind a trained product.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    split_heads: Callable[[Tensor, Turn], Heads] = split_heads
    swiglu: Callable[[Tensor], Tensor] = swiglu
    spares: Callable[[Tensor], AbstractContextManager[None]] = made_again
    gates: Gates | None = None


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """With r = 1 / sqrt(mean(x^2) + eps), g' = g w: x gets r (g' - x r^2 mean(g' x)), w the sum of g x r over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradients[0].float() * (x.float() * r)).sum(0).to(weight.dtype)
        return _norm_gradient(gradients[0].float() * weight, x, r).to(x.dtype), of_weight, None

    @staticmethod
    def again(ctx: Any) -> Tensor:
        """Return the result, bit by bit, from the saved tensors."""
        x, weight, r = ctx.saved_tensors
        return _weighed(x.float(), weight, r)


class _Rotate(torch.autograd.Function):  # type: ignore[misc]
    """The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, -sin), None, None


class _SplitHeads(torch.autograd.Function):  # type: ignore[misc]
    """Its backward pass writes all three gradients to one tensor, and rotates queries and keys in place."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Turn) -> Heads:
        ctx.turn, r = turn, None
        qk = qkv[:, : turn.heads + turn.kv_heads]
        if turn.norm_HD is not None:
            qk, r = _normed(qk, turn.norm_HD, turn.eps)
        ctx.save_for_backward(None if r is None else qkv, r)
        queries, keys = _turned(qk, turn.cos_N1P, turn.sin_N1P).split((turn.heads, turn.kv_heads), dim=1)
        return queries, keys, qkv[:, turn.heads + turn.kv_heads :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (qkv, r), turn = ctx.saved_tensors, ctx.turn
        tokens, _, size = gradients[0].shape
        g = gradients[0].new_empty(tokens, turn.heads + 2 * turn.kv_heads, size)
        of_queries, of_keys, of_values = g.split((turn.heads, turn.kv_heads, turn.kv_heads), dim=1)
        back = -turn.sin_N1P
        _turned(gradients[0], turn.cos_N1P, back, out=of_queries)
        _turned(gradients[1], turn.cos_N1P, back, out=of_keys)
        of_values.copy_(gradients[2])
        if turn.norm_HD is not None:
            of_qk, qk = (x[:, : turn.heads + turn.kv_heads] for x in (g, qkv))
            of_qk.copy_(_norm_gradient(of_qk.float().mul_(turn.norm_HD), qk, r))
        return g, None


class _SwiGlu(torch.autograd.Function):  # type: ignore[misc]
    """Computes silu(gate) again, in place of a fifth of the layer's activations."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        g = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        of_gate, of_up = g.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=of_up).mul_(gradients[0])
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=of_gate)
        return g

    @staticmethod
    def again(ctx: Any) -> Tensor:
        return _gated(*ctx.saved_tensors)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # one kernel on CUDA; given the weight, it would round once, after the product with it
    return functional.rms_norm(x, (x.shape[-1],), None, eps) * weight


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    r = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return _weighed(wide, weight, r), r


def _weighed(wide: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    return (wide * r).to(weight.dtype).mul_(weight)


def _norm_gradient(scaled: Tensor, x: Tensor, r: Tensor) -> Tensor:
    """Return the gradient of x; `scaled`, the output's gradient times the weight in fp32, is overwritten."""
    wide = x.float()
    along = (scaled * wide).mean(-1, keepdim=True).mul_(r).mul_(r).neg_()
    return scaled.addcmul_(wide, along).mul_(r)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return y
