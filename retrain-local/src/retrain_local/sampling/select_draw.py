"""Selects what draws tokens on a device: one kernel that proved right there, or PyTorch's passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from retrain_local.model.fused import numbers, proven
from retrain_local.sampling.draw import DrawnTokens, draw_tokens

TOLERANCE = 1e-4  # of the largest log-probability or entropy


class Draw(Protocol):
    """See `draw_tokens`."""

    def __call__(
        self, logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, *, entropy: bool
    ) -> DrawnTokens:
        """One token per row."""


def draw_for(device: torch.device, dtype: torch.dtype, vocabulary: int) -> Draw:
    """What draws from logits [rows, vocabulary] of this dtype; a kernel that should work and does not is left out."""

    def make() -> Draw:
        from retrain_local.sampling import draw_triton

        return draw_triton.draw_tokens

    kernel = proven("drawing kernels", device, make, lambda made: draw_faults(made, device, dtype, vocabulary))
    return draw_tokens if kernel is None else kernel


def draw_faults(made: Draw, device: torch.device, dtype: torch.dtype, vocabulary: int) -> Iterator[str]:
    """Where it differs from `draw_tokens`, for uniforms in the middle of the share of a likely token."""
    at_3 = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    logits_3V = 4 * numbers((3, vocabulary), torch.float32, device)
    logits_3V[torch.arange(3, device=device), at_3] = 14.0
    logits_3V = logits_3V.to(dtype)
    temperature = torch.full((), 0.9, device=device)
    probabilities_3V = torch.softmax(logits_3V.double() / temperature, dim=-1)
    own_31 = probabilities_3V.gather(1, at_3[:, None])
    uniforms_3 = (probabilities_3V.cumsum(dim=-1).gather(1, at_3[:, None]) - own_31 / 2)[:, 0]
    got, wanted = (draw(logits_3V, temperature, uniforms_3, entropy=True) for draw in (made, draw_tokens))
    if got.tokens_B.tolist() != at_3.tolist():
        yield f"it drew {got.tokens_B.tolist()}, not {at_3.tolist()}"
    assert got.entropies_B is not None
    assert wanted.entropies_B is not None
    pairs = (got.logprobs_B, wanted.logprobs_B), (got.entropies_B, wanted.entropies_B)
    for name, (one, other) in zip(("log-probability", "entropy"), pairs, strict=True):
        gap = float((one - other).abs().max())
        if not gap <= TOLERANCE * float(other.abs().max()):  # True for a NaN as well
            yield f"{name} off by {gap:.2g}"
