"""The loss of an optimizer step: the policy loss of `[algorithm]`, weighted and averaged over the whole step.

Its formulas are in `loss_formulas`; `evaluate_loss` computes a step of given log-probabilities without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from retrain.api import (
    Config,
    Floats,
    LossClip,
    LossContext,
    LossSpec,
    LossTerms,
    LossTrial,
    LossValue,
    PluginError,
    Plugins,
    Problem,
    TrainBatch,
    TrainRow,
    find_loss,
)
from retrain_local.training.loss_formulas import IMPORTANCE_SAMPLING, LIKELIHOOD, MAX_LOG_RATIO
from retrain_local.training.regularisers import NO_COLUMNS, Columns, Regularisers, added_terms


class ScoredTokens(Protocol):
    """The action tokens of a pack with their numbers, row by row; each row is one sequence of the loss."""

    @property
    def behaviour_logprobs_M(self) -> Tensor:
        """Those that the policy sampled with, or the trainer's own before the step."""

    @property
    def engine_logprobs_M(self) -> Tensor:
        """Those that the sampler itself reported."""

    @property
    def advantages_M(self) -> Tensor:
        """Credit of each token."""

    @property
    def sequences_M(self) -> Tensor:
        """Index of each token's row in the pack."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of the pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How the mismatch with the sampler is weighted: w = exp(log p_trainer,before the step - log p_sampler).

    `level` token: each by itself; sequence: the product over the sequence; geometric: its T-th root. Outside
    [`low`, `high`], `mode` truncate moves w to the bound and mask makes it 0, which changes no denominator.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = float("inf")

    def weights(self, before_M: Tensor, pack: ScoredTokens) -> tuple[Tensor, Tensor]:
        """Weight of each token, and whether it was outside the bounds; without gradient."""
        logs_M = before_M - pack.engine_logprobs_M
        if self.level != "token":
            zeros_S = logs_M.new_zeros(len(pack.rows))
            sums_S = zeros_S.index_add(0, pack.sequences_M, logs_M)
            if self.level == "geometric":
                sums_S = sums_S / zeros_S.index_add(0, pack.sequences_M, torch.ones_like(logs_M))
            logs_M = sums_S[pack.sequences_M]
        weights_M = logs_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside_M = (weights_M < self.low) | (weights_M > self.high)
        if self.mode == "mask":
            return weights_M.masked_fill(outside_M, 0.0), outside_M
        return weights_M.clamp(self.low, self.high), outside_M


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss with the numbers of `[algorithm]`; `mismatch` None leaves the mismatch with the sampler in the ratio."""

    spec: LossSpec = IMPORTANCE_SAMPLING
    clip: LossClip = field(default_factory=LossClip)
    aggregation: str = "token_mean"
    mismatch: Mismatch | None = None
    max_tokens: int = 1
    params: Any = None
    regularisers: Regularisers = field(default_factory=Regularisers)

    @classmethod
    def of(cls, config: Config, plugins: Plugins) -> PolicyLoss:
        """The loss that `[algorithm]` names, imported now; PluginError when it is none."""
        algorithm = config.algorithm
        spec, params = find_loss(config, plugins)
        dual = config.algorithm.dual_clip
        return cls(
            spec=spec,
            clip=spec.clip.resolved(algorithm.clip_eps, algorithm.clip_eps_high, dual),
            aggregation=config.algorithm.aggregation or spec.aggregation,
            mismatch=_mismatch(config),
            max_tokens=config.training.max_tokens,
            params=params,
            regularisers=Regularisers.of(config),
        )

    def is_fixed(self, batch: TrainBatch) -> bool:
        """Whether the behaviour log-probabilities of its rows are the trainer's own before the step."""
        return batch.updates > 1 and self.mismatch is not None

    def denominator(self, batch: TrainBatch) -> int:
        """What the step's sum is divided by: its action tokens, its sequences, or those times `max_tokens`.

        Sequences that were masked count in the last two.
        """
        if self.aggregation == "token_mean":
            return batch.num_actions
        sequences = sum(bool(row.action_T.any()) for row in batch.rows) + batch.num_masked
        return sequences * (self.max_tokens if self.aggregation == "constant" else 1)

    def clipped(self, new_M: Tensor, tokens: ScoredTokens, *, is_fixed: bool) -> Tensor:
        """Whether each token is clipped under these log-probabilities; no gradient."""
        with torch.no_grad():
            return self._terms(new_M, tokens, NO_COLUMNS, None, is_fixed=is_fixed)[1]

    def of_pack(
        self,
        new_M: Tensor,
        pack: ScoredTokens,
        denominator: int,
        *,
        columns: Columns = NO_COLUMNS,
        entropies_M: Tensor | None = None,
        is_fixed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Loss of a pack, -sum_m weight_m factor_m term_m, and how many of its tokens were clipped.

        weight = 1 / denominator, and for `sequence_mean` also 1 / (tokens of the sequence); factor = the weight of
        `mismatch`, 1 without. The losses of the packs add up to that of the step, however it was cut. With `is_fixed`
        the pack's behaviour log-probabilities are the trainer's own before the first of several updates. What
        `regularisers` add has the same weights; `entropies_M` carry a gradient, None without a bonus.
        """
        terms_M, clipped_M = self._terms(new_M, pack, columns, entropies_M, is_fixed=is_fixed)
        if self.aggregation == "sequence_mean":
            terms_M = terms_M / torch.bincount(pack.sequences_M)[pack.sequences_M]
        return -terms_M.sum() / denominator, clipped_M.sum()

    def _terms(
        self, new_M: Tensor, pack: ScoredTokens, columns: Columns, entropies_M: Tensor | None, *, is_fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """Term times factor of each token less what is added to the loss, and whether it was clipped."""
        old_M = pack.behaviour_logprobs_M
        factor_M, outside_M = torch.ones_like(old_M), torch.zeros_like(old_M, dtype=torch.bool)
        if self.mismatch is not None:
            old_M = old_M if is_fixed else new_M.detach()
            factor_M, outside_M = self.mismatch.weights(old_M, pack)
        context = LossContext(
            new_M=new_M,
            old_M=old_M,
            ratios_M=(new_M - old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
            advantages_M=pack.advantages_M,
            sequences_M=pack.sequences_M,
            num_sequences=len(pack.rows),
            clip=self.clip,
            params=self.params,
        )
        found = self._checked(self.spec.compute(context), new_M)
        clipped_M = outside_M if found.clipped_M is None else outside_M | found.clipped_M
        terms_M = factor_M * found.terms_M
        if columns.dropped_M is not None:
            terms_M = terms_M * ~columns.dropped_M
        added_M = added_terms(self.regularisers, columns, new_M, old_M, context.ratios_M, entropies_M)
        return terms_M if added_M is None else terms_M - added_M, clipped_M

    def _checked(self, found: Any, new_M: Tensor) -> LossTerms:
        """What a loss returned, as `LossTerms`; PluginError unless there is one number per token."""
        terms = found if isinstance(found, LossTerms) else LossTerms(terms_M=found)
        for what, values_M in (("terms", terms.terms_M), ("clipped tokens", terms.clipped_M)):
            if values_M is None and what != "terms":
                continue
            if not isinstance(values_M, Tensor) or values_M.shape != new_M.shape:
                got = f"shape {tuple(values_M.shape)}" if isinstance(values_M, Tensor) else type(values_M).__name__
                told = f"loss {self.spec.name!r} returned {what} of {got}, expected {tuple(new_M.shape)}"
                fix = "return one number per token of the pack, not summed or averaged"
                raise PluginError(Problem(where="[algorithm] loss", what=told, fix=fix))
        return terms


NAMED = {"likelihood": PolicyLoss(spec=LIKELIHOOD)}  # what `TrainBatch.loss` may name: nothing is added to these


def _mismatch(config: Config) -> Mismatch | None:
    """The weights of `tis_cap` or `is_bounds`; None when both are off."""
    cap, bounds = config.algorithm.tis_cap, list[float](config.algorithm.is_bounds)
    if cap <= 0.0 and not bounds:
        return None
    level, mode = config.algorithm.is_level, config.algorithm.is_mode
    low, high = bounds or (0.0, cap)
    return Mismatch(level=level, mode=mode, low=low, high=high)


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
