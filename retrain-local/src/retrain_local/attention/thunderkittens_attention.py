"""ThunderKittens' causal attention for the buckets of `PaddedAttend` without a prefix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.attention.padded import PaddedAttend
from retrain_local.decoder import Scores, Shape

HEAD_SIZES = 64, 128
LENGTH_STEP = 768  # its forward pass takes multiples of 192 tokens, its backward pass of 256


class KittensAttend(PaddedAttend):
    """`Attend` that falls back to `PaddedAttend` for prefixes, windows, custom scales and sinks."""

    def _attended(self, number: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        is_plain = scores.window is None and scores.softcap is None and scores.sinks_H is None
        length, size = q.shape[2:]
        if not is_plain or k.shape[2] != length or scores.scale != size**-0.5:
            return super()._attended(number, q, k, v, scores)
        # causal attention: padding after the last token is never attended to
        more = -length % LENGTH_STEP
        longer = (functional.pad(x, (0, 0, 0, more)).contiguous() for x in (q, k, v))
        out: Tensor = _Kittens.apply(*longer)
        return out[:, :, :length]


def kittens_refusal(dtype: torch.dtype, shape: Shape) -> str | None:
    """Why the kernel cannot serve a model; None if it can."""
    if dtype is not torch.bfloat16:
        return f"ThunderKittens' attention computes in bfloat16, the model is {dtype}"
    if shape.head_size not in HEAD_SIZES or shape.value_size != shape.head_size:
        return f"ThunderKittens' attention has heads of size 64 and 128, the model's are {shape.head_size}"
    return None


class _Kittens(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        import thunderkittens

        out, sums = thunderkittens.mha_forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, out, sums)
        kept: Tensor = out
        return kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        import thunderkittens

        into = thunderkittens.mha_backward(*ctx.saved_tensors, gradients[0].contiguous(), True)
        q, k, v = ctx.saved_tensors[:3]
        return tuple(gradient.to(x.dtype) for gradient, x in zip(into, (q, k, v), strict=True))
