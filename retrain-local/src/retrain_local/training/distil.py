"""The distillation term of a step (`[distil]`): the policy's distribution is drawn to its teacher's, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrain.api import DistilTable, Floats, TrainRow
from retrain_local.decoder import TrainedDecoder
from retrain_local.training.head import logprobs_and_divergences
from retrain_local.training.loss_formulas import MAX_LOG_RATIO
from retrain_local.training.packs import ActionTokens, Pack, joined, split_by_row, untrained

HiddenOf = Callable[[Sequence[TrainRow], Sequence[int]], Sequence[tuple[list[int], Floats]]]


def divergences(table: DistilTable, policy_MV: Tensor, teacher_MV: Tensor) -> Tensor:
    """Return the divergence of two distributions for each token, from their log-probabilities.

    alpha KL(q, m) + (1 - alpha) KL(p, m), m = (1 - alpha) p + alpha q; at 0 KL(q, p), at 1 KL(p, q).
    """
    p_MV, q_MV, alpha = policy_MV, teacher_MV, table.alpha
    if table.mode == "topk":
        tops = p_MV.topk(min(table.top_k, p_MV.shape[1]), dim=-1)
        p_MV, q_MV = _among(table, tops.values), _among(table, q_MV.gather(1, tops.indices))
    if alpha in (0.0, 1.0):
        return _kl(p_MV, q_MV) if alpha else _kl(q_MV, p_MV)
    mixture_MV = torch.logaddexp(p_MV + math.log(1.0 - alpha), q_MV + math.log(alpha))
    return alpha * _kl(q_MV, mixture_MV) + (1.0 - alpha) * _kl(p_MV, mixture_MV)


def _among(table: DistilTable, logprobs_MK: Tensor) -> Tensor:
    """Return the distribution over these tokens, or over these and one more for all others."""
    totals_M1 = logprobs_MK.logsumexp(-1, keepdim=True)
    if not table.tail:
        return logprobs_MK - totals_M1
    # Below 0, because the logarithm of nothing left has no gradient.
    return torch.cat([logprobs_MK, torch.log(-torch.expm1(totals_M1.clamp(max=-1e-7)))], dim=-1)


def distilled(
    table: DistilTable, new_M: Tensor, pack: ActionTokens, rows: Sequence[TrainRow], divergences_M: Tensor | None = None
) -> Tensor:
    """Return the sum over a pack's rows of their mean of min(sg(rho), ratio_cap) x divergence; 0 without a teacher.

    In mode sampled_token the divergence is sg(log p - log q) log p: its gradient is the gradient of KL(p, q), and its
    value is no measure.
    """
    shares, given = list[np.ndarray](), list[np.ndarray]()
    for row in (rows[number] for number in pack.rows):
        count = int(np.count_nonzero(row.action_T))
        kept = (np.arange(count) >= table.skip_tokens) & (row.teacher is not None)
        shares.append(kept / max(1, int(np.count_nonzero(kept))))
        given.append(np.zeros(count) if row.teacher is None else row.teacher.logprobs_A)
    if divergences_M is None:
        divergences_M = (new_M - joined(given, new_M.dtype, new_M.device)).detach() * new_M
    if table.ratio_cap:
        logs_M = (new_M.detach() - pack.behaviour_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        divergences_M = divergences_M * logs_M.exp().clamp(max=table.ratio_cap)
    return (joined(shares, new_M.dtype, new_M.device) * divergences_M).sum()


def _kl(of_MV: Tensor, to_MV: Tensor) -> Tensor:
    return (of_MV.exp() * (of_MV - to_MV)).sum(-1)


class SelfTeacher:
    """The policy's weights that teach it: the reference, the current ones, or their average; only that is held."""

    def __init__(self, table: DistilTable, decoder: TrainedDecoder, parameters: Mapping[str, nn.Parameter]) -> None:
        self._table, self._decoder, self._parameters = table, decoder, parameters
        is_average = table.teacher == "ema"
        self.average = {name: p.detach().clone() for name, p in parameters.items()} if is_average else {}

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Compute with the weights of the teacher within the block; take no gradient there."""
        if self._table.teacher == "base":
            with self._decoder.as_reference():
                yield
            return
        own = {name: self._parameters[name].detach().clone() for name in self.average}
        self._set(self.average)
        try:
            yield
        finally:
            self._set(own)

    def update(self) -> None:
        """Move the average towards the current weights: (1 - rate) average + rate p."""
        for name, average in self.average.items():
            average.lerp_(self._parameters[name].detach(), self._table.ema_rate)

    def hidden(self, rows: Sequence[TrainRow], hidden_of: HiddenOf) -> dict[int, Floats]:
        """Return its hidden states at the rows' action tokens, 0 without a teacher; {} if no distribution is compared.

        `hidden_of` gives them by pack, with the indices of the rows. Distributions would take far more memory.
        """
        numbers = [number for number, row in enumerate(rows) if row.teacher is not None]
        if self._table.mode == "sampled_token" or not numbers:
            return {}
        shown = untrained([row.teacher for row in rows if row.teacher is not None])
        with self.weights():
            found = hidden_of(shown, range(len(shown)))
        by_row = ((places, split_by_row(values, [shown[at] for at in places])) for places, values in found)
        taught = {numbers[at]: part for places, parts in by_row for at, part in zip(places, parts, strict=True)}
        sizes = ((np.count_nonzero(row.action_T), next(iter(taught.values())).shape[1]) for row in rows)
        return {n: taught[n] if n in taught else np.zeros(size, np.float32) for n, size in enumerate(sizes)}

    def compared(
        self, hidden_MD: Tensor, taught: Mapping[int, Floats], pack: Pack, *given: Any
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of a pack's tokens and divergences; `given`: head, vocabulary, temperature."""
        teacher_MD = joined([taught[number] for number in pack.rows], hidden_MD.dtype, hidden_MD.device)
        compare = partial(divergences, self._table)
        return logprobs_and_divergences(hidden_MD, teacher_MD, pack.tokens_M, compare, *given)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        # In place, since other tensors are views of the same memory.
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)
