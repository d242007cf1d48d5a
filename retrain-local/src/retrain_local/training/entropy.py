"""Log-probabilities of sampled tokens together with the entropies they were drawn at, both with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrain_local.sizes import LOGIT_CHUNK
from retrain_local.training.head import pulled_back


def logprobs_and_entropies(
    hidden_MD: Tensor, tokens_M: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Both of softmax(head(hidden) / temperature), in nats, fp32 [M]; the first is `head.selected_logprobs`.

    Memory is bounded as there: no tensor [tokens, vocabulary] exists.
    """
    if not len(tokens_M):
        nothing_M = hidden_MD.new_zeros(0, dtype=torch.float32)
        return nothing_M, nothing_M
    rows = max(1, LOGIT_CHUNK.get(hidden_MD.device.type, LOGIT_CHUNK["cuda"]) // vocabulary)
    logprobs_M, entropies_M = _LogprobsAndEntropies.apply(hidden_MD, tokens_M, head, temperature, rows)
    return logprobs_M, entropies_M


class _LogprobsAndEntropies(torch.autograd.Function):  # type: ignore[misc]
    """Both depend on a row's own hidden state alone, so both gradients are taken while the chunk's logits are there.

    By the logits z, d log p_t / dz = (onehot - p) / T and dH / dz_j = -p_j (log p_j + H) / T. The head runs once
    forward and twice backward, and two vectors of the hidden size are stored per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        tokens_M: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        values: tuple[list[Tensor], list[Tensor]] = [], []
        slopes: tuple[list[Tensor], list[Tensor]] = [], []
        for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
            chunk = hidden.detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                logits = head(chunk)
            found, slopes_MV = _values_and_slopes(logits.detach(), tokens, temperature)
            for at in range(2):
                values[at].append(found[at])
                if wanted:
                    slopes[at].extend(pulled_back(logits, slopes_MV[at], (chunk,), keep=at == 0))
        if wanted:
            ctx.save_for_backward(*map(torch.cat, slopes))
        return torch.cat(values[0]), torch.cat(values[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_logprobs_MD, of_entropies_MD = ctx.saved_tensors
        found_MD = of_logprobs_MD * gradients[0][:, None] + of_entropies_MD * gradients[1][:, None]
        return found_MD.to(of_logprobs_MD.dtype), None, None, None, None


def _values_and_slopes(
    logits_MV: Tensor, tokens_M: Tensor, temperature: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    scaled_MV = logits_MV.float()
    scaled_MV = torch.log_softmax(scaled_MV if temperature == 1.0 else scaled_MV / temperature, dim=-1)
    logprobs_M = scaled_MV.gather(1, tokens_M[:, None])[:, 0]
    p_MV = scaled_MV.exp()
    surprise_MV = torch.special.entr(p_MV)  # -p log p, 0 where p is
    entropies_M = surprise_MV.sum(-1)
    of_entropies_MV = surprise_MV.sub_(p_MV * entropies_M[:, None]).div_(temperature)
    of_logprobs_MV = p_MV.mul_(-1.0 / temperature)
    of_logprobs_MV.scatter_add_(1, tokens_M[:, None], p_MV.new_full((len(tokens_M), 1), 1.0 / temperature))
    dtype = logits_MV.dtype
    return (logprobs_M, entropies_M), (of_logprobs_MV.to(dtype), of_entropies_MV.to(dtype))
