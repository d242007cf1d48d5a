"""The configured loss of a step of given log-probabilities, without a model and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.api import Config, Floats, LossTrial, LossValue, Plugins, TrainRow
from retrain_local.training.loss import PolicyLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The action tokens of a pack; see `ScoredTokens`."""

    rows: tuple[int, ...]
    sequences_M: Tensor
    behaviour_logprobs_M: Tensor
    engine_logprobs_M: Tensor
    advantages_M: Tensor


def evaluate_loss(config: Config, plugins: Plugins, trial: LossTrial) -> LossValue:
    """Value, gradient and clipped tokens, as the trainer would find them if its model gave these log-probabilities."""
    loss, batch = PolicyLoss.of(config, plugins), trial.batch
    denominator = loss.denominator(batch)
    gradients: list[Floats] = [np.zeros(len(row.tokens_T)) for row in batch.rows]
    total, clipped = 0.0, 0
    for numbers in trial.packs:
        rows = [batch.rows[number] for number in numbers]
        new_M = _joined([trial.logprobs[number] for number in numbers], rows).requires_grad_()
        is_fixed = batch.updates > 1 and loss.mismatch is not None
        value, count = loss.of_pack(new_M, _tokens(tuple(numbers), rows), denominator, is_fixed=is_fixed)
        total, clipped = total + float(value.detach()), clipped + int(count)
        (gradient_M,) = torch.autograd.grad(value, new_M)
        ends = np.cumsum([np.count_nonzero(row.action_T) for row in rows])[:-1]
        for number, row, part in zip(numbers, rows, np.split(gradient_M.numpy(), ends), strict=True):
            gradients[number][row.action_T] = part
    return LossValue(loss=total, gradients=gradients, clipped=clipped)


def _tokens(numbers: tuple[int, ...], rows: Sequence[TrainRow]) -> _Tokens:
    engine = [row.logprobs_T if row.engine_logprobs_T is None else row.engine_logprobs_T for row in rows]
    counts = [int(np.count_nonzero(row.action_T)) for row in rows]
    return _Tokens(
        rows=numbers,
        sequences_M=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        behaviour_logprobs_M=_joined([row.logprobs_T for row in rows], rows),
        engine_logprobs_M=_joined(engine, rows),
        advantages_M=_joined([row.advantages_T for row in rows], rows),
    )


def _joined(values: Sequence[Floats], rows: Sequence[TrainRow]) -> Tensor:
    """The values at the action tokens of all rows."""
    return torch.from_numpy(np.concatenate([v[row.action_T] for v, row in zip(values, rows, strict=True)]))
