"""One token for every row of a batch, with the log-probability of the very distribution it was drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**25  # rows x vocabulary turned to float64 at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """Token ids, natural log-probabilities and, if asked for, entropies in nats: one per row."""

    tokens_B: Tensor
    logprobs_B: Tensor
    entropies_B: Tensor | None


def draw_tokens(logits_BV: Tensor, temperature: float, uniforms_B: Tensor, *, entropy: bool) -> Draw:
    """Sample from softmax(logits / temperature) by inverting its distribution function.

    `uniforms_B` are float64 in [0, 1). The token is the first whose cumulative probability exceeds the uniform's share
    of the total, so a token of probability zero is never drawn and a row depends on its own logits and uniform alone.
    A row with a NaN or +inf among its logits yields a log-probability that is not finite; the caller looks for it.
    """
    rows = max(1, CHUNK_ELEMENTS // logits_BV.shape[1])
    parts = [
        _draw(logits, temperature, uniforms, entropy)
        for logits, uniforms in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    entropies = torch.cat([part.entropies_B for part in parts if part.entropies_B is not None]) if entropy else None
    return Draw(
        tokens_B=torch.cat([part.tokens_B for part in parts]),
        logprobs_B=torch.cat([part.logprobs_B for part in parts]),
        entropies_B=entropies,
    )


def _draw(logits_BV: Tensor, temperature: float, uniforms_B: Tensor, entropy: bool) -> Draw:
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    probabilities_BV = logprobs_BV.exp()
    cumulative_BV = probabilities_BV.double().cumsum(dim=-1)
    total_B = cumulative_BV[:, -1]
    # u < 1, yet u * total can round up to total, which nothing exceeds
    below_total_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    wanted_B = torch.minimum(uniforms_B * total_B, below_total_B)
    tokens_B1 = torch.searchsorted(cumulative_BV, wanted_B[:, None], right=True).clamp_(max=logits_BV.shape[1] - 1)
    entropies_B = torch.special.entr(probabilities_BV).sum(dim=-1) if entropy else None
    return Draw(
        tokens_B=tokens_B1[:, 0],
        logprobs_B=logprobs_BV.gather(1, tokens_B1)[:, 0],
        entropies_B=entropies_B,
    )
