"""One token for every row of a batch, with the log-probability of the very distribution it was drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**25  # rows x vocabulary turned to fp32 at a time
ONE_LEVEL = 4096  # vocabulary up to which one cumulative sum is the faster way
BELOW_ONE = 1.0 - 2.0**-52  # times a float64 it is below that float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """Token ids, natural log-probabilities and, if asked for, entropies in nats: one per row."""

    tokens_B: Tensor
    logprobs_B: Tensor
    entropies_B: Tensor | None


def draw_tokens(logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, *, entropy: bool) -> Draw:
    """Sample from softmax(logits / temperature) by inverting its distribution function.

    `uniforms_B` are float64 in [0, 1). The token is the first whose cumulative probability exceeds the uniform's share
    of the total, so a token of probability zero is never drawn and a row depends on its own logits and uniform alone.
    A row with a NaN or +inf among its logits yields a log-probability that is not finite; the caller looks for it.
    """
    rows = max(1, CHUNK_ELEMENTS // logits_BV.shape[1])
    if len(logits_BV) <= rows:
        return _draw(logits_BV, temperature, uniforms_B, entropy)
    parts = [
        _draw(logits, temperature, uniforms, entropy)
        for logits, uniforms in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
    ]
    return Draw(
        tokens_B=torch.cat([part.tokens_B for part in parts]),
        logprobs_B=torch.cat([part.logprobs_B for part in parts]),
        entropies_B=torch.cat([part.entropies_B for part in parts if part.entropies_B is not None])
        if entropy
        else None,
    )


def _draw(logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, entropy: bool) -> Draw:
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    invert = _invert if logits_BV.shape[1] <= ONE_LEVEL else _invert_by_pieces
    # u < 1, yet u * total could round up to total, which no cumulative probability exceeds
    probabilities_BV = logprobs_BV.exp()
    tokens_B1 = invert(probabilities_BV, uniforms_B.clamp(max=BELOW_ONE))
    return Draw(
        tokens_B=tokens_B1[:, 0],
        logprobs_B=logprobs_BV.gather(1, tokens_B1)[:, 0],
        entropies_B=torch.special.entr(probabilities_BV).sum(dim=-1) if entropy else None,
    )


def _invert(probabilities_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    """Index [B, 1] of the first whose cumulative probability exceeds the uniform's share of the total."""
    cumulative_BN = probabilities_BN.cumsum(dim=-1, dtype=torch.float64)
    wanted_B1 = (uniforms_B * cumulative_BN[:, -1])[:, None]
    # past the end only where a NaN is among the probabilities
    return torch.searchsorted(cumulative_BN, wanted_B1, right=True).clamp_(max=probabilities_BN.shape[1] - 1)


def _invert_by_pieces(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The same in two levels: the piece of the vocabulary that the uniform falls into, then the token inside it.

    Only the sums of pieces and one piece per row, together about 2 sqrt(vocabulary) numbers, are taken to float64.
    """
    vocabulary = probabilities_BV.shape[1]
    size = 2 ** math.ceil(math.log2(vocabulary) / 2)
    whole = vocabulary // size * size
    sums = [probabilities_BV[:, :whole].unflatten(1, (-1, size)).sum(dim=-1)]
    if whole < vocabulary:
        sums.append(probabilities_BV[:, whole:].sum(dim=-1, keepdim=True))
    sums_BC = torch.cat(sums, dim=1).double()
    ends_BC = sums_BC.cumsum(dim=-1)
    wanted_B1 = (uniforms_B * ends_BC[:, -1])[:, None]
    piece_B1 = torch.searchsorted(ends_BC, wanted_B1, right=True).clamp_(max=sums_BC.shape[1] - 1)
    sum_B1 = sums_BC.gather(1, piece_B1)
    into_B1 = (wanted_B1 - (ends_BC.gather(1, piece_B1) - sum_B1)) / sum_B1
    index_BS = piece_B1 * size + torch.arange(size, device=piece_B1.device)
    inside_BS = probabilities_BV.gather(1, index_BS.clamp(max=vocabulary - 1)).masked_fill_(index_BS >= vocabulary, 0.0)
    place_B1 = _invert(inside_BS, into_B1[:, 0].clamp(min=0.0, max=BELOW_ONE))
    return (piece_B1 * size + place_B1).clamp_(max=vocabulary - 1)
