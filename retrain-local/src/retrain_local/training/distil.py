"""The distillation term of a step: the policy's distribution is drawn to its teacher's, token by token (`[distil]`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from retrain.api import Config, DistilTable, Floats, TrainRow
from retrain_local.decoder import TrainedDecoder
from retrain_local.training.loss_formulas import MAX_LOG_RATIO
from retrain_local.training.packs import ActionTokens, Pack, joined, split_by_row, untrained

SAMPLED_TOKEN = "sampled_token"
# By pack: indices of the rows, and hidden states at their action tokens.
HiddenOf = Callable[[Sequence[TrainRow], Sequence[int]], Sequence[tuple[list[int], Floats]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distil:
    """`[distil]`, as the loss needs it."""

    mode: str = SAMPLED_TOKEN
    top_k: int = 100
    tail: bool = False
    alpha: float = 1.0
    ratio_cap: float = 2.0
    skip_tokens: int = 0
    weight: float = 1.0

    @classmethod
    def of(cls, config: Config) -> Distil | None:
        if not config.distil.teacher:
            return None
        return cls(**config.distil.model_dump(include=set(cls.__slots__)))

    def divergences(self, policy_MV: Tensor, teacher_MV: Tensor) -> Tensor:
        """Return the divergence of two distributions for each token, from their log-probabilities."""
        if self.mode == "topk":
            tops = policy_MV.topk(min(self.top_k, policy_MV.shape[1]), dim=-1)
            policy_MV, teacher_MV = (self._among(x) for x in (tops.values, teacher_MV.gather(1, tops.indices)))
        return divergence(policy_MV, teacher_MV, self.alpha)

    def _among(self, logprobs_MK: Tensor) -> Tensor:
        """Return the distribution over these tokens, or over these and one more for all others."""
        totals_M1 = logprobs_MK.logsumexp(-1, keepdim=True)
        if not self.tail:
            return logprobs_MK - totals_M1
        # Below 0, because the logarithm of nothing left has no gradient.
        rest_M1 = torch.log(-torch.expm1(totals_M1.clamp(max=-1e-7)))
        return torch.cat([logprobs_MK, rest_M1], dim=-1)

    def of_pack(
        self,
        new_M: Tensor,
        pack: ActionTokens,
        rows: Sequence[TrainRow],
        sequences: int,
        divergences_M: Tensor | None = None,
    ) -> Tensor:
        """Return the share of a pack in the mean over `sequences` of the mean over their tokens of ratio x divergence.

        A row without a teacher counts 0. In mode sampled_token a token's divergence is sg(log p - log q) log p: its
        gradient is the gradient of KL(p, q), and its value is no measure.
        """
        own = [rows[number] for number in pack.rows]
        weights, given = list[np.ndarray](), list[np.ndarray]()
        for row in own:
            count = int(np.count_nonzero(row.action_T))
            kept = (np.arange(count) >= self.skip_tokens) & (row.teacher is not None)
            weights.append(kept / max(1, int(np.count_nonzero(kept))))
            given.append(np.zeros(count) if row.teacher is None else row.teacher.logprobs_A)
        if divergences_M is None:
            divergences_M = (new_M - joined(given, new_M.dtype, new_M.device)).detach() * new_M
        if self.ratio_cap:
            logs_M = (new_M.detach() - pack.behaviour_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            divergences_M = divergences_M * logs_M.exp().clamp(max=self.ratio_cap)
        return (joined(weights, new_M.dtype, new_M.device) * divergences_M).sum() / sequences


def divergence(policy_MV: Tensor, teacher_MV: Tensor, alpha: float) -> Tensor:
    """Return alpha KL(q, m) + (1 - alpha) KL(p, m), m = (1 - alpha) p + alpha q; at 0 KL(q, p), at 1 KL(p, q)."""
    if alpha == 0.0:
        return kl(teacher_MV, policy_MV)
    if alpha == 1.0:
        return kl(policy_MV, teacher_MV)
    mixture_MV = torch.logaddexp(policy_MV + math.log(1.0 - alpha), teacher_MV + math.log(alpha))
    return alpha * kl(teacher_MV, mixture_MV) + (1.0 - alpha) * kl(policy_MV, mixture_MV)


def kl(of_MV: Tensor, to_MV: Tensor) -> Tensor:
    """Return KL(of, to) of each row, from log-probabilities."""
    return (of_MV.exp() * (of_MV - to_MV)).sum(-1)


def hidden_of_tokens(taught: Mapping[int, Floats], rows: Sequence[TrainRow], pack: Pack) -> Tensor:
    """Return the teacher's hidden states at the action tokens of a pack, 0 for rows without a teacher, [M, hidden]."""
    width = next(iter(taught.values())).shape[1]
    counts = [int(np.count_nonzero(rows[number].action_T)) for number in pack.rows]
    parts = [
        taught.get(number, np.zeros((count, width), np.float32))
        for number, count in zip(pack.rows, counts, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


class SelfTeacher:
    """The policy's weights that teach it: the reference, the current ones, or their average over the steps.

    Only the average is held, as large as the adapter.
    """

    def __init__(self, table: DistilTable, decoder: TrainedDecoder, parameters: Mapping[str, nn.Parameter]) -> None:
        self._kind, self._rate, self._mode = table.teacher, table.ema_rate, table.mode
        self._decoder, self._parameters = decoder, parameters
        is_average = table.teacher == "ema"
        self.average = {name: p.detach().clone() for name, p in parameters.items()} if is_average else {}

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Compute with the weights of the teacher within the block; take no gradient there."""
        if self._kind == "base":
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
            average.lerp_(self._parameters[name].detach(), self._rate)

    def hidden(self, rows: Sequence[TrainRow], hidden_of: HiddenOf) -> dict[int, Floats]:
        """Return its hidden states at the action tokens of the rows that have a teacher, by index of the row.

        Only where the loss compares distributions: they take far less memory than the distributions.
        """
        if self._mode == SAMPLED_TOKEN:
            return {}
        numbers = [number for number, row in enumerate(rows) if row.teacher is not None]
        shown = untrained([row.teacher for row in rows if row.teacher is not None])
        with self.weights():
            found = hidden_of(shown, range(len(shown)))
        return {
            numbers[at]: values_MD
            for places, pack_MD in found
            for at, values_MD in zip(places, split_by_row(pack_MD, [shown[at] for at in places]), strict=True)
        }

    def _set(self, values: Mapping[str, Tensor]) -> None:
        # In place, since other tensors are views of the same memory.
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)
