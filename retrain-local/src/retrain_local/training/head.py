"""Log-probabilities of sampled tokens straight from hidden states, in chunks: no tensor [tokens, vocabulary] exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrain_local.sizes import LOGIT_CHUNK


class _SelectedLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """log softmax(head(hidden) / temperature) at one token per row, in fp32.

    The log-probability of a row depends on its own hidden state alone. Its gradient, the head's backward pass of
    (onehot - softmax) / temperature, is therefore computed in the forward pass while the chunk's logits are available:
    the head runs once in each direction, and one vector of the hidden size is stored per row.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, tokens_M: Tensor, head: Callable[[Tensor], Tensor], temperature: float, rows: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        logprobs, slopes = [], []
        for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
            chunk = hidden.detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                logits = head(chunk)
            scaled = logits.detach().float()
            scaled = torch.log_softmax(scaled if temperature == 1.0 else scaled / temperature, dim=-1)
            logprobs.append(scaled.gather(1, tokens[:, None])[:, 0])
            if wanted:
                slope = scaled.exp_().mul_(-1.0 / temperature)
                slope.scatter_add_(1, tokens[:, None], slope.new_full((len(tokens), 1), 1.0 / temperature))
                with torch.enable_grad():
                    seeded = _Seeded.apply(logits, slope.to(logits.dtype))
                slopes += torch.autograd.grad(seeded, chunk)
        if wanted:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slopes_MD,) = ctx.saved_tensors
        return (slopes_MD * gradients[0][:, None]).to(slopes_MD.dtype), None, None, None, None


class _Seeded(torch.autograd.Function):  # type: ignore[misc]
    """A zero whose gradient with respect to `logits` is `slope`.

    Passing `slope` to torch.autograd.grad would give the same result, but imports sympy: half a second in the first
    step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return slope.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def selected_logprobs(
    hidden_MD: Tensor, tokens_M: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, temperature: float
) -> Tensor:
    """Natural log-probability of each token under softmax(head(hidden) / temperature), fp32 [M], differentiable.

    `head` turns hidden states [m, hidden] into logits [m, vocabulary], each row by itself. Memory is bounded by
    `LOGIT_CHUNK` logits, whatever M and the vocabulary are (Liger kernels, arXiv:2410.10989, chunk the same way;
    here the log-probabilities are an output, so that any loss can follow).
    """
    if not len(tokens_M):
        return hidden_MD.new_zeros(0, dtype=torch.float32)
    rows = max(1, LOGIT_CHUNK.get(hidden_MD.device.type, LOGIT_CHUNK["cuda"]) // vocabulary)
    result: Tensor = _SelectedLogprobs.apply(hidden_MD, tokens_M, head, temperature, rows)
    return result
