"""A decoder of the Llama family that is trained as a whole, and the products that its gradient goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrain_local.model.llama import LlamaDecoder
from retrain_local.model.weights import Linear

WEIGHTS = ("_embedding", "_norm", "_head", "_sampled_head", "_layers")  # what a `LlamaDecoder` computes with
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class FullDecoder(LlamaDecoder):
    """A decoder that is trained as a whole; its reference, the model of the files, is read when first asked for."""

    read_reference: Callable[[], LlamaDecoder]
    _reference: LlamaDecoder | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.is_ordered = False  # the embedding's gradient scatters

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        self._reference = self._reference or self.read_reference()
        with computing_with(self._reference, self, WEIGHTS):
            yield


@contextmanager
def computing_with(other: object, decoder: object, names: Sequence[str]) -> Iterator[None]:
    """Within the block `decoder` has the attributes of `other` under these names."""
    own = {name: getattr(decoder, name) for name in names}
    try:
        decoder.__dict__ |= {name: getattr(other, name) for name in names}
        yield
    finally:
        decoder.__dict__ |= own


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedLinear:
    """x W^T + bias with every number trained; `parts` are views of the fused matrix, then of the bias."""

    linear: Linear
    parts: tuple[nn.Parameter, ...]

    def __call__(self, x_NI: Tensor) -> Tensor:
        y_NO: Tensor = _Linear.apply(x_NI, self.linear, *self.parts)
        return y_NO


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """Stores only x for the backward pass; the weights are rounded to its dtype in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear, *parts: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return functional.linear(x, linear.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), linear, g = ctx.saved_tensors, ctx.linear, gradients[0]
        of_parts = (g.T @ x).to(linear.weight.dtype).split(linear.sizes)
        if linear.bias is not None:
            of_parts += g.sum(0, dtype=linear.bias.dtype).split(linear.sizes)
        of_x = g @ linear.weight.to(g.dtype) if ctx.needs_input_grad[0] else None
        return of_x, None, *of_parts


def norm_names(at: int) -> list[str]:
    """Of the norms before attention, before the feed-forward part, of queries, of keys."""
    layer = f"model.layers.{at}."
    names = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return [f"{layer}{name}.weight" for name in names]
