"""The loss of an optimizer step: the policy loss of `[algorithm]`, weighted and averaged over the whole step.

Its formulas are in `loss_formulas`; `evaluate_loss` computes a step of given log-probabilities without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.api import (
    Config,
    DistilTable,
    Floats,
    LossClip,
    LossContext,
    LossSpec,
    LossTerms,
    LossTrial,
    LossValue,
    Mask,
    PluginError,
    Plugins,
    Problem,
    Seeds,
    TrainBatch,
    find_loss,
)
from retrain_local.training.loss_formulas import IMPORTANCE_SAMPLING, LIKELIHOOD, MAX_LOG_RATIO
from retrain_local.training.packs import ActionTokens, joined, split_by_row
from retrain_local.training.regularisers import (
    NO_COLUMNS,
    Columns,
    Marked,
    Regularisers,
    added_terms,
    covariances,
    drawn_between,
    highest,
)


def _sums_of_sequences(values_M: Tensor, pack: ActionTokens) -> Tensor:
    """Return for each token the sum over its sequence, which `index_add` would compute in no order on CUDA."""
    zeros_S, place = values_M.new_zeros(len(pack.rows)), (pack.sequences_M,)
    return zeros_S.index_put(place, values_M, accumulate=True)[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The weight of the mismatch with the sampler, w = exp(log p_trainer,before the step - log p_sampler).

    `level` token: each by itself; sequence: the product over the sequence; geometric: its T-th root. Outside
    [`low`, `high`], `mode` truncate moves w to the bound and mask makes it 0, without changing the denominator.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = float("inf")

    def weights(self, before_M: Tensor, pack: ActionTokens) -> tuple[Tensor, Tensor]:
        """Return the weight of each token, and True where it was outside the bounds; without gradient."""
        logs_M = before_M - pack.engine_logprobs_M
        if self.level != "token":
            sums_M = _sums_of_sequences(logs_M, pack)
            logs_M = sums_M / _sums_of_sequences(torch.ones_like(logs_M), pack) if self.level == "geometric" else sums_M
        weights_M = logs_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside_M = (weights_M < self.low) | (weights_M > self.high)
        if self.mode == "mask":
            return weights_M.masked_fill(outside_M, 0.0), outside_M
        return weights_M.clamp(self.low, self.high), outside_M


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss with the numbers of `[algorithm]`; `mismatch` None leaves the mismatch with the sampler in the ratio.

    `off_policy_mask` > 0 leaves out tokens with A < 0 of sequences whose mean of log p_sampler - log p is above it
    (DeepSeek-V3.2, arXiv:2512.02556); they stay in the denominator.
    """

    spec: LossSpec = IMPORTANCE_SAMPLING
    clip: LossClip = field(default_factory=LossClip)
    aggregation: str = "token_mean"
    mismatch: Mismatch | None = None
    off_policy_mask: float = 0.0
    level: str = "sequence"
    max_tokens: int = 1
    params: Any = None
    regularisers: Regularisers = field(default_factory=Regularisers)
    distil: DistilTable | None = None

    @classmethod
    def of(cls, config: Config, plugins: Plugins) -> PolicyLoss:
        algorithm = config.algorithm
        spec, params = find_loss(config, plugins)
        low, high = algorithm.is_bounds or (0.0, algorithm.tis_cap)
        is_weighted = bool(algorithm.is_bounds) or algorithm.tis_cap > 0.0
        weights = Mismatch(level=algorithm.is_level, mode=algorithm.is_mode, low=low, high=high)
        return cls(
            spec=spec,
            clip=spec.clip.resolved(algorithm.clip_eps, algorithm.clip_eps_high, algorithm.dual_clip),
            aggregation=algorithm.aggregation or spec.aggregation,
            mismatch=weights if is_weighted else None,
            off_policy_mask=algorithm.off_policy_mask,
            level=algorithm.level,
            max_tokens=config.training.max_tokens,
            params=params,
            regularisers=Regularisers.of(config),
            distil=config.distil if config.distil.teacher else None,
        )

    @property
    def has_marks(self) -> bool:
        """True if tokens are selected over the whole step."""
        return self.regularisers.has_marks or self.spec.drops is not None

    def is_fixed(self, batch: TrainBatch) -> bool:
        """True if the behaviour log-probabilities of its rows are the trainer's before the step."""
        return batch.updates > 1 and self.mismatch is not None

    def denominator(self, batch: TrainBatch) -> int:
        """Return the step's divisor: its actions, or its sequences (masked ones too), or these x `max_tokens`."""
        if self.aggregation == "token_mean":
            return batch.num_actions
        return self.sequences(batch) * (self.max_tokens if self.aggregation == "constant" else 1)

    def sequences(self, batch: TrainBatch) -> int:
        return sum(bool(row.action_T.any()) for row in batch.rows) + batch.num_masked

    def marked(self, batch: TrainBatch, now: Sequence[Floats], seeds: Seeds) -> Marked:
        """Select the step's tokens of kl_cov, of clip_cov, or that the loss drops; `now` is before the update."""
        settings, rows = self.regularisers, batch.rows
        logprobs_N = np.concatenate([now_T[row.action_T] for now_T, row in zip(now, rows, strict=True)])
        advantages_N = np.concatenate([row.advantages_T[row.action_T] for row in rows])
        cov_N = covariances(logprobs_N, advantages_N)
        if settings.kl_cov:
            return Marked(held=split_by_row(highest(cov_N, settings.kl_cov), rows))
        dropped_N = self._dropped(batch, logprobs_N)
        if not settings.clip_cov:
            return Marked(dropped=split_by_row(dropped_N, rows))
        free_N = ~dropped_N
        if batch.update:  # before the first one nothing has moved
            new_N, tokens = torch.from_numpy(logprobs_N).float(), ActionTokens.of(range(len(rows)), rows)
            with torch.no_grad():
                clipped_N = self._terms(new_N, tokens, NO_COLUMNS, None, is_fixed=self.is_fixed(batch))[1]
            free_N &= ~clipped_N.numpy()
        rng = seeds.stream("clip_cov", batch.step, batch.update)
        low, high = settings.clip_cov_low, settings.clip_cov_high
        drawn_N = drawn_between(cov_N, free_N, settings.clip_cov, low, high, rng)
        return Marked(dropped=split_by_row(dropped_N | drawn_N, rows))

    def _dropped(self, batch: TrainBatch, logprobs_N: Floats) -> Mask:
        """Mark the tokens of the step that the loss drops."""
        if self.spec.drops is None:
            return np.zeros(len(logprobs_N), np.bool_)
        tokens = ActionTokens.of(range(len(batch.rows)), batch.rows, dtype=torch.float64)
        new_N = torch.from_numpy(logprobs_N)
        context, _, _ = self._context(new_N, tokens, is_fixed=self.is_fixed(batch))
        found = self._checked(LossTerms(terms_M=new_N, clipped_M=self.spec.drops(context)), new_N)
        dropped_N: Mask = found.clipped_M.numpy()
        return dropped_N

    def of_pack(
        self,
        new_M: Tensor,
        pack: ActionTokens,
        denominator: int,
        *,
        columns: Columns = NO_COLUMNS,
        entropies_M: Tensor | None = None,
        is_fixed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a pack, -sum_m weight_m factor_m term_m, and the number of clipped tokens.

        weight = 1 / denominator, and for `sequence_mean` also 1 / (tokens of the sequence); factor = the weight of
        `mismatch`, or 1. The losses of all packs add up to the loss of the step, however it was cut. With `is_fixed`
        the pack's behaviour log-probabilities are the trainer's before the first of several updates. The terms of
        `regularisers` have the same weights; `entropies_M` carry a gradient, None without a bonus.
        """
        terms_M, clipped_M = self._terms(new_M, pack, columns, entropies_M, is_fixed=is_fixed)
        if self.aggregation == "sequence_mean":
            terms_M = terms_M / _sums_of_sequences(torch.ones_like(terms_M), pack)
        return -terms_M.sum() / denominator, clipped_M.sum()

    def _terms(
        self, new_M: Tensor, pack: ActionTokens, columns: Columns, entropies_M: Tensor | None, *, is_fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return each token's term times factor, less the regularisers, and True for clipped tokens."""
        context, factor_M, outside_M = self._context(new_M, pack, is_fixed=is_fixed)
        found = self._checked(self.spec.compute(context), new_M)
        clipped_M = outside_M if found.clipped_M is None else outside_M | found.clipped_M
        terms_M = factor_M * found.terms_M
        if columns.dropped_M is not None:
            terms_M, clipped_M = terms_M * ~columns.dropped_M, clipped_M | columns.dropped_M
        added_M = added_terms(self.regularisers, columns, new_M, context.old_M, context.ratios_M, entropies_M)
        return terms_M if added_M is None else terms_M - added_M, clipped_M

    def _context(self, new_M: Tensor, pack: ActionTokens, *, is_fixed: bool) -> tuple[LossContext, Tensor, Tensor]:
        """Return the context of the loss, each token's factor, and True where it was bounded or left out."""
        old_M = pack.behaviour_logprobs_M
        factor_M, outside_M = torch.ones_like(old_M), torch.zeros_like(old_M, dtype=torch.bool)
        if self.mismatch is not None:
            old_M = old_M if is_fixed else new_M.detach()
            factor_M, outside_M = self.mismatch.weights(old_M, pack)
        sequences_M, num_sequences = pack.sequences_M, len(pack.rows)
        if self.level == "turn":
            sequences_M, num_sequences = joined([pack.turns_M], torch.int64, new_M.device), int(pack.turns_M[-1]) + 1
        context = LossContext(
            new_M=new_M,
            old_M=old_M,
            ratios_M=(new_M - old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
            advantages_M=pack.advantages_M,
            sequences_M=sequences_M,
            num_sequences=num_sequences,
            clip=self.clip,
            params=self.params,
        )
        if self.off_policy_mask:
            gaps_M = context.sequence_mean(pack.engine_logprobs_M - new_M.detach())
            left_M = (pack.advantages_M < 0.0) & (gaps_M > self.off_policy_mask)
            factor_M, outside_M = factor_M.masked_fill(left_M, 0.0), outside_M | left_M
        return context, factor_M, outside_M

    def _checked(self, found: Any, new_M: Tensor) -> LossTerms:
        terms = found if isinstance(found, LossTerms) else LossTerms(terms_M=found)
        for name, values_M in (("terms", terms.terms_M), ("clipped tokens", terms.clipped_M)):
            if values_M is None and name != "terms":
                continue
            if not isinstance(values_M, Tensor) or values_M.shape != new_M.shape:
                got = f"shape {tuple(values_M.shape)}" if isinstance(values_M, Tensor) else type(values_M).__name__
                what = f"loss {self.spec.name!r} returned {name} of {got}, expected {tuple(new_M.shape)}"
                fix = "return one number per token of the pack, not summed or averaged"
                raise PluginError(Problem(code="plugin.loss-shape", where="[algorithm] loss", what=what, fix=fix))
        return terms


# Keyed by `TrainBatch.loss`; without regularisers.
NAMED = {"likelihood": PolicyLoss(spec=LIKELIHOOD)}


def evaluate_loss(config: Config, plugins: Plugins, trial: LossTrial) -> LossValue:
    """Compute value, gradient and clipped tokens as the trainer would if its model gave these log-probabilities."""
    loss, batch = PolicyLoss.of(config, plugins), trial.batch
    denominator = loss.denominator(batch)
    marked = loss.marked(batch, trial.logprobs, Seeds(0)) if loss.spec.drops else Marked()
    gradients: list[Floats] = [np.zeros(len(row.tokens_T)) for row in batch.rows]
    total, clipped = 0.0, 0
    for numbers in trial.packs:
        rows = [batch.rows[number] for number in numbers]
        own = [trial.logprobs[number][row.action_T] for number, row in zip(numbers, rows, strict=True)]
        new_M = torch.from_numpy(np.concatenate(own)).requires_grad_()
        tokens = ActionTokens.of(numbers, rows, dtype=torch.float64)
        dropped = torch.from_numpy(np.concatenate(marked.of(numbers).dropped)) if marked.dropped else None
        columns = Columns(dropped_M=dropped)
        value, count = loss.of_pack(new_M, tokens, denominator, columns=columns, is_fixed=loss.is_fixed(batch))
        total, clipped = total + float(value.detach()), clipped + int(count)
        (gradient_M,) = torch.autograd.grad(value, new_M)
        for number, row, part in zip(numbers, rows, split_by_row(gradient_M.numpy(), rows), strict=True):
            gradients[number][row.action_T] = part
    return LossValue(loss=total, gradients=gradients, clipped=clipped)
