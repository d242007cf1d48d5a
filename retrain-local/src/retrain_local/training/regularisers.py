"""Terms added to the policy's loss, token by token: KL to the reference, entropy, and the two covariance terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from retrain.api import Config, Floats, Mask, TrainRow
from retrain_local.training.loss_formulas import MAX_LOG_RATIO
from retrain_local.training.packs import Pack, joined, reference_logprobs

# Nats that sampler and trainer may differ by on the same weights, by rounding.
SAME_POLICY = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularisers:
    """`[kl] estimator` and `[entropy]`; the KL's coefficient comes with the rows (`TrainRow.kl_coef`)."""

    estimator: str = "k3"
    entropy: float = 0.0
    kl_cov: float = 0.0
    kl_cov_coef: float = 1.0
    clip_cov: float = 0.0
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0

    @classmethod
    def of(cls, config: Config) -> Regularisers:
        given = config.entropy.model_dump()
        return cls(estimator=config.kl.estimator or "k3", entropy=given.pop("coef"), **given)

    @property
    def has_marks(self) -> bool:
        """True if tokens are selected by their covariance."""
        return self.kl_cov > 0.0 or self.clip_cov > 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Inputs of these terms for a pack's action tokens; None where no row needs them.

    `held_M` are the tokens of kl_cov, `dropped_M` the ones of clip_cov, without a gradient from the policy's term.
    """

    reference_M: Tensor | None = None
    kl_coefs_M: Tensor | None = None
    held_M: Tensor | None = None
    dropped_M: Tensor | None = None


NO_COLUMNS = Columns()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marked:
    """Tokens of every row that kl_cov or clip_cov selected, over the whole optimizer step; [] with neither.

    Their log-probability and advantage move together and so lower the entropy (arXiv:2505.22617).
    """

    held: Sequence[Mask] = ()
    dropped: Sequence[Mask] = ()

    def of(self, numbers: Sequence[int]) -> Marked:
        held, dropped = ([marks[number] for number in numbers] if marks else () for marks in (self.held, self.dropped))
        return Marked(held=held, dropped=dropped)


def added_terms(
    settings: Regularisers, columns: Columns, new_M: Tensor, old_M: Tensor, ratios_M: Tensor, entropies_M: Tensor | None
) -> Tensor | None:
    """Return the sum of a token's terms, before its weight; None without terms."""
    added: list[Tensor] = []
    if columns.reference_M is not None and columns.kl_coefs_M is not None:
        added.append(columns.kl_coefs_M * kl_terms(settings.estimator, new_M, columns.reference_M, ratios_M))
    if entropies_M is not None:
        added.append(-settings.entropy * entropies_M)
    if columns.held_M is not None:
        added.append(settings.kl_cov_coef * columns.held_M * distances(new_M, old_M))
    return torch.stack(added).sum(0) if added else None


def kl_terms(estimator: str, new_M: Tensor, reference_M: Tensor, ratios_M: Tensor) -> Tensor:
    """Estimate the KL divergence from the reference per token; the gradient is the divergence's.

    With d = reference - new, clamped to [-20, 20], and rho the ratio to the policy that sampled: k1: -rho d;
    k3: rho (e^d - 1 - d); k2: sg(rho) d²/2. Without its weight the gradient of k1 is 0 and k3's is the forward
    divergence's. The gradient of k2 is right, and a weight with a gradient would spoil it (arXiv:2510.01555).
    ValueError for k1 or k3 whose weight has no gradient.
    """
    d_M = (reference_M - new_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k2":
        return ratios_M.detach() * d_M.square() / 2.0
    if new_M.requires_grad and not ratios_M.requires_grad:
        raise ValueError(f"{estimator} in the loss needs an importance weight with a gradient")
    return ratios_M * (-d_M if estimator == "k1" else torch.expm1(d_M) - d_M)


def distances(new_M: Tensor, old_M: Tensor) -> Tensor:
    """Return |new - old|, without a gradient where both come from the same weights: its sign is only rounding."""
    gaps_M = (new_M - old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    return gaps_M * (gaps_M > SAME_POLICY)


def columns_of(rows: Sequence[TrainRow], pack: Pack, marked: Marked) -> Columns:
    own, device = [rows[number] for number in pack.rows], pack.tokens_M.device
    held_M, dropped_M = (
        joined([marks[number] for number in pack.rows], torch.bool, device) if marks else None
        for marks in (marked.held, marked.dropped)
    )
    reference_M = coefs_M = None
    if any(row.kl_coef and row.reference_logprobs_T is not None for row in rows):
        references = [reference_logprobs(row)[row.action_T] for row in own]
        reference_M = joined(references, torch.float32, device)
        coefs_M = joined([np.full(int(row.action_T.sum()), row.kl_coef) for row in own], torch.float32, device)
    return Columns(reference_M=reference_M, kl_coefs_M=coefs_M, held_M=held_M, dropped_M=dropped_M)


def covariances(logprobs_N: Floats, advantages_N: Floats) -> Floats:
    """Return (log p - mean)(A - mean) of every action token of an optimizer step (arXiv:2505.22617)."""
    result: Floats = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    return result


def highest(covariances_N: Floats, share: float) -> Mask:
    """Mark the max(1, int(share N)) tokens of the highest covariance; of equal ones the first."""
    chosen_N = np.zeros(len(covariances_N), np.bool_)
    chosen_N[np.argsort(-covariances_N, kind="stable")[: max(1, int(share * len(covariances_N)))]] = True
    return chosen_N


def drawn_between(covariances_N: Floats, free_N: Mask, share: float, low: float, high: float, rng: Generator) -> Mask:
    """Draw up to max(1, int(share N)) tokens among the `free_N` ones with a covariance in (low, high)."""
    chosen_N = np.zeros(len(covariances_N), np.bool_)
    candidates = np.flatnonzero((covariances_N > low) & (covariances_N < high) & free_N)
    count = min(max(1, int(share * len(covariances_N))), len(candidates))
    chosen_N[rng.choice(candidates, count, replace=False)] = True
    return chosen_N
