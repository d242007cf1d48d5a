"""Tokens whose log-probability and advantage move together, which is what lowers the entropy (arXiv:2505.22617)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from retrain.api import Floats, Mask, Seeds, TrainBatch, TrainRow
from retrain_local.training.packs import engine_logprobs
from retrain_local.training.regularisers import Marked
from retrain_local.training.step_loss import PolicyLoss


def mark(loss: PolicyLoss, batch: TrainBatch, now: Sequence[Floats], seeds: Seeds) -> Marked:
    """The tokens of kl_cov or clip_cov, chosen among all action tokens of the optimizer step, however it is packed.

    `now` are the log-probabilities of the policy that is about to be updated.
    """
    settings, rows = loss.regularisers, batch.rows
    logprobs_N = np.concatenate([now_T[row.action_T] for now_T, row in zip(now, rows, strict=True)])
    advantages_N = np.concatenate([row.advantages_T[row.action_T] for row in rows])
    cov_N = covariances(logprobs_N, advantages_N)
    if settings.kl_cov:
        return Marked(held=_by_row(highest(cov_N, settings.kl_cov), rows))
    free_N = np.ones(len(cov_N), np.bool_)
    if batch.update:  # before the first one nothing has moved
        clipped_N = loss.clipped(torch.from_numpy(logprobs_N).float(), _Tokens.of(rows), is_fixed=loss.is_fixed(batch))
        free_N = ~clipped_N.numpy()
    rng = seeds.stream("clip_cov", batch.step, batch.update)
    low, high = settings.clip_cov_low, settings.clip_cov_high
    return Marked(dropped=_by_row(drawn_between(cov_N, free_N, settings.clip_cov, low, high, rng), rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tokens:
    """All action tokens of an optimizer step, row by row; see `loss.ScoredTokens`."""

    rows: tuple[int, ...]
    behaviour_logprobs_M: Tensor
    engine_logprobs_M: Tensor
    advantages_M: Tensor
    sequences_M: Tensor

    @classmethod
    def of(cls, rows: Sequence[TrainRow]) -> _Tokens:
        def joined(values: Sequence[Floats]) -> Tensor:
            return torch.from_numpy(np.concatenate([v[r.action_T] for v, r in zip(values, rows, strict=True)])).float()

        counts = [int(row.action_T.sum()) for row in rows]
        return cls(
            rows=tuple(range(len(rows))),
            behaviour_logprobs_M=joined([row.logprobs_T for row in rows]),
            engine_logprobs_M=joined([engine_logprobs(row) for row in rows]),
            advantages_M=joined([row.advantages_T for row in rows]),
            sequences_M=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        )


def _by_row(marks_N: Mask, rows: Sequence[TrainRow]) -> list[Mask]:
    """The marks of each row's action tokens."""
    ends = np.cumsum([np.count_nonzero(row.action_T) for row in rows])
    return np.split(marks_N, ends[:-1])


def covariances(logprobs_N: Floats, advantages_N: Floats) -> Floats:
    """(log p - mean)(A - mean) of every action token of an optimizer step (arXiv:2505.22617)."""
    result: Floats = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    return result


def highest(covariances_N: Floats, share: float) -> Mask:
    """The max(1, int(share N)) tokens of the highest covariance; of equal ones the first."""
    chosen_N = np.zeros(len(covariances_N), np.bool_)
    chosen_N[np.argsort(-covariances_N, kind="stable")[: _count(share, covariances_N)]] = True
    return chosen_N


def drawn_between(covariances_N: Floats, free_N: Mask, share: float, low: float, high: float, rng: Generator) -> Mask:
    """Up to max(1, int(share N)) tokens, drawn among the `free_N` ones whose covariance lies in (low, high)."""
    chosen_N = np.zeros(len(covariances_N), np.bool_)
    candidates = np.flatnonzero((covariances_N > low) & (covariances_N < high) & free_N)
    count = min(_count(share, covariances_N), len(candidates))
    chosen_N[rng.choice(candidates, count, replace=False)] = True
    return chosen_N


def _count(share: float, covariances_N: Floats) -> int:
    return max(1, int(share * len(covariances_N)))
