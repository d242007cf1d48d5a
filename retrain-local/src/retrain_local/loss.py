"""Log-probabilities of the tokens that were sampled, and the importance-sampling loss over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
CHUNK_ELEMENTS = 2**24  # logits turned to fp32 at a time


class _SelectedLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """log softmax(logits / temperature) at one token per row, in fp32, without keeping the fp32 logits.

    The gradient, (onehot - softmax) / temperature, is made again from the logits in chunks of rows; autograd's own
    chain would hold three fp32 tensors of the logits' size.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
        parts = []
        for logits, tokens in _chunks(logits_NV, tokens_N):
            scaled = logits.float() / temperature
            parts.append(scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=-1))
        ctx.save_for_backward(logits_NV, tokens_N)
        ctx.temperature = temperature
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, tokens_N = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        start = 0
        for logits, tokens in _chunks(logits_NV, tokens_N):
            stop = start + len(tokens)
            scale = gradients[0][start:stop, None] / ctx.temperature
            chunk = torch.softmax(logits.float() / ctx.temperature, dim=-1).mul_(-scale)
            chunk[torch.arange(len(tokens), device=chunk.device), tokens] += scale[:, 0]
            gradient_NV[start:stop] = chunk
            start = stop
        return gradient_NV, None, None


def selected_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """Natural log-probability of each token under softmax(logits / temperature), fp32 [N], differentiable."""
    result: Tensor = _SelectedLogprobs.apply(logits_NV, tokens_N, temperature)
    return result


def importance_sampling_loss(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, denominator: int) -> Tensor:
    """-(1 / denominator) sum_t rho_t A_t with rho = exp(clamp(new - old, -20, 20)); no clipping of rho.

    `denominator` is the number of action tokens of the whole optimizer step, so the sum over its micro-batches is the
    token mean however they were cut. Off-policy gradients are weighted by rho; at rho = 1 this is REINFORCE.
    """
    ratios_N = (new_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -(ratios_N * advantages_N).sum() / denominator


def _chunks(logits_NV: Tensor, tokens_N: Tensor) -> zip[tuple[Tensor, Tensor]]:
    rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[1])
    return zip(logits_NV.split(rows), tokens_N.split(rows), strict=True)
