"""Samples one token per row, with its log-probability under the distribution it was sampled from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.devices.kernel_trials import difference, numbers, proven
from retrain_local.memory.sizes import DRAW_CHUNK

# Tokens; a vocabulary that does not divide into pieces of at least this length is padded.
SHORTEST_PIECE = 32
# In place of -inf, so that the product with a probability of zero is zero and not NaN.
LEAST_LOGPROB = -1e4
CHECKED_ROWS = 3, 1, 16  # Triton compiles other variants for 1, for multiples of 16 and for other numbers
CHECK_TOLERANCE = 1e-4  # of the largest log-probability or entropy
# A float64 times this is smaller than the float64.
BELOW_ONE = 1.0 - 2.0**-52


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTokens:
    """Token ids, natural log-probabilities and, if requested, entropies in nats: one per row."""

    tokens_B: Tensor
    logprobs_B: Tensor
    entropies_B: Tensor | None


def draw_tokens(
    logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, *, entropy: bool, greedy: bool = False
) -> DrawnTokens:
    """Sample from softmax(logits / temperature) by inverting its distribution function.

    `uniforms_B` are float64 in [0, 1). The token is the first whose cumulative probability exceeds the uniform's share
    of the total, so a token of probability zero is never drawn and a row depends on its logits and uniform only.
    `greedy` takes the likeliest token instead; log-probabilities and entropies are still at the temperature.
    A row with a NaN or +inf among its logits yields a non-finite log-probability; the caller must check for it.
    """
    rows = max(1, DRAW_CHUNK // logits_BV.shape[1])
    if len(logits_BV) <= rows:
        return _draw(logits_BV, temperature, uniforms_B, entropy, greedy)
    parts = [
        _draw(logits, temperature, uniforms, entropy, greedy)
        for logits, uniforms in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
    ]
    entropies = [part.entropies_B for part in parts if part.entropies_B is not None]
    return DrawnTokens(
        tokens_B=torch.cat([part.tokens_B for part in parts]),
        logprobs_B=torch.cat([part.logprobs_B for part in parts]),
        entropies_B=torch.cat(entropies) if entropies else None,
    )


def _draw(
    logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, entropy: bool, greedy: bool
) -> DrawnTokens:
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    probabilities_BV = logprobs_BV.exp()
    tokens_B1 = logits_BV.argmax(-1, keepdim=True) if greedy else _inverted(probabilities_BV, uniforms_B[:, None])
    logprobs_B, entropies_B = logprobs_BV.gather(1, tokens_B1)[:, 0], None
    # In place; `torch.special.entr` takes three times as long on a CPU.
    if entropy:
        entropies_B = probabilities_BV.mul_(logprobs_BV.clamp_(min=LEAST_LOGPROB)).sum(dim=-1).neg_()
    return DrawnTokens(tokens_B=tokens_B1[:, 0], logprobs_B=logprobs_B, entropies_B=entropies_B)


def _inverted(probabilities_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return tokens [B, 1], in two levels: the piece of the vocabulary that the uniform falls into, then its token."""
    # Only the sums of the pieces and one piece per row, a few hundred numbers each, are float64 and summed in order.
    vocabulary = probabilities_BV.shape[1]
    wanted_size = 2 ** math.ceil(math.log2(max(vocabulary, 2)) / 2)
    size = math.gcd(vocabulary, wanted_size)
    if size < SHORTEST_PIECE:
        size = wanted_size
        probabilities_BV = functional.pad(probabilities_BV, (0, -vocabulary % size))
    probabilities_BCS = probabilities_BV.unflatten(1, (-1, size))
    sums_BC = probabilities_BCS.sum(dim=-1).double()
    piece_B1, into_B1 = _first_above(sums_BC, uniforms_B1)
    rows_B = torch.arange(len(piece_B1), device=piece_B1.device)
    place_B1, _ = _first_above(probabilities_BCS[rows_B, piece_B1[:, 0]].double(), into_B1)
    return place_B1.add_(piece_B1, alpha=size).clamp_(max=vocabulary - 1)


def _first_above(weights_BN: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulative weight exceeds the uniform's share, and the place in it, [0, 1)."""
    ends_BN = weights_BN.cumsum(dim=-1)
    # u < 1, yet u * total could round up to the total, and no cumulative weight exceeds it
    wanted_B1 = uniforms_B1.clamp(min=0.0, max=BELOW_ONE).mul_(ends_BN[:, -1:])
    # past the end only where a NaN is among the weights
    index_B1 = torch.searchsorted(ends_BN, wanted_B1, right=True).clamp_(max=weights_BN.shape[1] - 1)
    weight_B1 = weights_BN.gather(1, index_B1)
    return index_B1, wanted_B1.sub_(ends_BN.gather(1, index_B1)).add_(weight_B1).div_(weight_B1)


class Draw(Protocol):
    """Draws as `draw_tokens` does, one token per row."""

    def __call__(
        self, logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, *, entropy: bool
    ) -> DrawnTokens: ...


def draw_for(device: torch.device, dtype: torch.dtype, vocabulary: int) -> Draw:
    place, given = "retrain_local.sampling.draw_triton:draw_tokens", (device, dtype, vocabulary)
    kernel: Draw | None = proven("drawing kernels", device, place, lambda made: draw_faults(made, *given))
    return kernel or draw_tokens


def draw_faults(made: Draw, device: torch.device, dtype: torch.dtype, vocabulary: int) -> Iterator[str]:
    """Yield differences from `draw_tokens`, for uniforms in the middle of the share of a likely token."""
    at_3 = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    logits_3V = 4 * numbers((3, vocabulary), torch.float32, device)
    logits_3V[torch.arange(3, device=device), at_3] = 14.0
    logits_3V = logits_3V.to(dtype)
    temperature = torch.full((), 0.9, device=device)
    probabilities_3V = torch.softmax(logits_3V.double() / temperature, dim=-1)
    own_31 = probabilities_3V.gather(1, at_3[:, None])
    uniforms_3 = (probabilities_3V.cumsum(dim=-1).gather(1, at_3[:, None]) - own_31 / 2)[:, 0]
    for rows in CHECKED_ROWS:
        which = torch.arange(rows, device=device) % 3
        given, at = (logits_3V[which], temperature, uniforms_3[which]), at_3[which].tolist()
        got, wanted = (draw(*given, entropy=True) for draw in (made, draw_tokens))
        if got.tokens_B.tolist() != at:
            yield f"it drew {got.tokens_B.tolist()}, not {at}"
        assert got.entropies_B is not None
        assert wanted.entropies_B is not None
        yield from difference("log-probability", got.logprobs_B, wanted.logprobs_B, CHECK_TOLERANCE)
        yield from difference("entropy", got.entropies_B, wanted.entropies_B, CHECK_TOLERANCE)
