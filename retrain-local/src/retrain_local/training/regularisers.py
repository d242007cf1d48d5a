"""What is added to the policy's loss, token by token: KL to the reference, entropy, and the two covariance terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.api import Config, Mask, TrainRow
from retrain_local.training.loss_formulas import MAX_LOG_RATIO
from retrain_local.training.packs import Pack

SAME_POLICY = 1e-4  # nats that sampler and trainer may differ on the same weights


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
        """The settings of a run."""
        names = ("kl_cov", "kl_cov_coef", "clip_cov", "clip_cov_low", "clip_cov_high")
        given = {name: config.value(f"entropy.{name}", getattr(cls(), name)) for name in names}
        entropy = config.entropy.coef
        return cls(estimator=config.kl.estimator or "k3", entropy=entropy, **given)

    @property
    def has_marks(self) -> bool:
        """Whether tokens are chosen by their covariance."""
        return self.kl_cov > 0.0 or self.clip_cov > 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """What these terms need to know of a pack's action tokens; None where no row asks for it.

    `held_M` are the tokens of kl_cov, `dropped_M` those of clip_cov, which get no gradient from the policy's term.
    """

    reference_M: Tensor | None = None
    kl_coefs_M: Tensor | None = None
    held_M: Tensor | None = None
    dropped_M: Tensor | None = None


NO_COLUMNS = Columns()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marked:
    """Tokens of every row that kl_cov or clip_cov chose, over the whole optimizer step; [] with neither."""

    held: Sequence[Mask] = ()
    dropped: Sequence[Mask] = ()

    def of(self, numbers: Sequence[int]) -> Marked:
        """Those of the rows with these indices."""
        held, dropped = ([marks[number] for number in numbers] if marks else () for marks in (self.held, self.dropped))
        return Marked(held=held, dropped=dropped)


def added_terms(
    settings: Regularisers, columns: Columns, new_M: Tensor, old_M: Tensor, ratios_M: Tensor, entropies_M: Tensor | None
) -> Tensor | None:
    """What each token adds to the loss, before its weight; None when nothing does."""
    added: list[Tensor] = []
    if columns.reference_M is not None and columns.kl_coefs_M is not None:
        added.append(columns.kl_coefs_M * kl_terms(settings.estimator, new_M, columns.reference_M, ratios_M))
    if entropies_M is not None:
        added.append(-settings.entropy * entropies_M)
    if columns.held_M is not None:
        added.append(settings.kl_cov_coef * columns.held_M * distances(new_M, old_M))
    return torch.stack(added).sum(0) if added else None


def kl_terms(estimator: str, new_M: Tensor, reference_M: Tensor, ratios_M: Tensor) -> Tensor:
    """An estimate per token of the KL divergence from the reference, whose gradient is that of the divergence.

    With d = reference - new, clamped to [-20, 20], and rho the ratio to the policy that sampled: k1: -rho d;
    k3: rho (e^d - 1 - d); k2: sg(rho) d²/2. Without its weight the gradient of k1 is 0 and that of k3 is the forward
    divergence's; k2 has the right one as it is, and a weight with a gradient would spoil it (arXiv:2510.01555).
    ValueError for k1 or k3 whose weight has no gradient.
    """
    d_M = (reference_M - new_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k2":
        return ratios_M.detach() * d_M.square() / 2.0
    if new_M.requires_grad and not ratios_M.requires_grad:
        raise ValueError(f"{estimator} in the loss needs an importance weight with a gradient")
    return ratios_M * (-d_M if estimator == "k1" else torch.expm1(d_M) - d_M)


def distances(new_M: Tensor, old_M: Tensor) -> Tensor:
    """|new - old|, without a gradient where both come from the same weights: its sign is only rounding there."""
    gaps_M = (new_M - old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    return gaps_M * (gaps_M > SAME_POLICY)


def columns_of(rows: Sequence[TrainRow], pack: Pack, marked: Marked) -> Columns:
    """The columns of one pack of an optimizer step."""
    own = [(number, rows[number]) for number in pack.rows]

    def moved(values: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device=pack.tokens_M.device, dtype=dtype)

    def marks(of_rows: Sequence[Mask]) -> Tensor | None:
        return moved([of_rows[number] for number, _ in own], torch.bool) if of_rows else None

    reference_M = coefs_M = None
    if any(row.kl_coef and row.reference_logprobs_T is not None for row in rows):
        references = [
            row.logprobs_T if row.reference_logprobs_T is None else row.reference_logprobs_T for _, row in own
        ]
        actions = [row.action_T for _, row in own]
        reference_M = moved([r[a] for r, a in zip(references, actions, strict=True)], torch.float32)
        coefs = [np.full(int(a.sum()), row.kl_coef) for a, (_, row) in zip(actions, own, strict=True)]
        coefs_M = moved(coefs, torch.float32)
    return Columns(
        reference_M=reference_M, kl_coefs_M=coefs_M, held_M=marks(marked.held), dropped_M=marks(marked.dropped)
    )
