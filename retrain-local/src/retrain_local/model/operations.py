"""Norm, rotation and gate of the Llama family, with gradients of their own: each reads and writes its tensors once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32 inside; `weight` is frozen.

    `weight` has the size of the last axis, or of the last two where heads have weights of their own.
    """
    if x.is_cuda:  # one kernel there, several on a CPU
        own = weight.dim() == 1
        normed = functional.rms_norm(x, (x.shape[-1],), weight if own else None, eps)
        return normed if own else normed * weight
    if not torch.is_grad_enabled():
        return _normed(x, weight, eps)[0]
    y: Tensor = _RmsNorm.apply(x, weight, eps)
    return y


def rotate(x_NHD: Tensor, cos_N1P: Tensor, sin_N1P: Tensor) -> Tensor:
    """Turn the pairs (x[p], x[p + D/2]) of every head by the angles whose cosine and sine are given."""
    if not torch.is_grad_enabled():
        return _turned(x_NHD, cos_N1P, sin_N1P)
    y_NHD: Tensor = _Rotate.apply(x_NHD, cos_N1P, sin_N1P)
    return y_NHD


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What stands between the products of a layer."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    swiglu: Callable[[Tensor], Tensor] = swiglu


def compiled() -> Operations:
    """The same as single kernels, in both directions, made by torch.compile when they are first called."""
    made = [torch.compile(operation, dynamic=True) for operation in (_plain_rms_norm, _plain_rotate, swiglu)]
    return Operations(rms_norm=made[0], rotate=made[1], swiglu=made[2])


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _plain_rotate(x_NHD: Tensor, cos_N1P: Tensor, sin_N1P: Tensor) -> Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    return torch.cat((first * cos_N1P - second * sin_N1P, second * cos_N1P + first * sin_N1P), dim=-1)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """With r = 1 / sqrt(mean(x^2) + eps) and g' = g w: the gradient is r (g' - x r^2 mean(g' x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        wide, scaled = x.float(), gradients[0].float() * weight
        along = (scaled * wide).mean(-1, keepdim=True).mul_(r).mul_(r).neg_()
        return scaled.addcmul_(wide, along).mul_(r).to(x.dtype), None, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    r = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * r).to(x.dtype).mul_(weight), r


class _Rotate(torch.autograd.Function):  # type: ignore[misc]
    """The gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return y
