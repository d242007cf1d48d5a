"""The policy losses over log-probabilities of the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retrain.api import Config

MAX_LOG_RATIO = 20.0
CISPO_WEIGHT = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """`[algorithm] loss` and its numbers: the ratio's bounds (ppo), the largest weight (cispo), the cap (0 = off)."""

    kind: str = "importance_sampling"
    low: float = 0.8
    high: float = 1.2
    tis_cap: float = 0.0

    @classmethod
    def of(cls, config: Config) -> LossSettings:
        """The settings of `[algorithm]`."""
        algorithm = config.algorithm
        standard = CISPO_WEIGHT if algorithm.loss == "cispo" else 1.0 + algorithm.clip_eps
        given = algorithm.clip_eps_high if algorithm.loss == "cispo" else 1.0 + algorithm.clip_eps_high
        high = given if algorithm.clip_eps_high > 0.0 else standard
        return cls(kind=algorithm.loss, low=1.0 - algorithm.clip_eps, high=high, tis_cap=algorithm.tis_cap)


def policy_loss(
    new_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    denominator: int,
    settings: LossSettings,
    engine_N: Tensor | None = None,
    *,
    is_fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Loss of a micro-batch, -(1 / denominator) sum_t term_t, and how many of its tokens were clipped.

    With rho = exp(clamp(new - behaviour, -20, 20)), sg = no gradient: importance_sampling: rho A; ppo: min(rho A,
    clip(rho, low, high) A); cispo: sg(min(rho, high)) A new. `tis_cap` > 0 splits rho in two: the ratio is relative to
    the trainer's own log-probabilities before the step (so it is 1 where the gradient is taken), and the mismatch with
    the sampler becomes the factor sg(min(rho, tis_cap)). Where `behaviour` was recomputed with the training model,
    `engine_N` are the sampler's own, and the mismatch is relative to those. With `is_fixed`, `behaviour` are
    the trainer's own before the first of several updates, and the mismatch stays that of this moment. `denominator` is
    the number of action tokens of the whole optimizer step, so that the losses of its micro-batches add up to the token
    mean however it was split. PPO: arXiv:1707.06347; CISPO: arXiv:2506.13585; truncation as in IMPALA.
    """
    sampler_N = behaviour_N if engine_N is None else engine_N
    trainer_N = behaviour_N if is_fixed else new_N.detach()
    mismatch_N = (trainer_N - sampler_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    factor_N, clipped_N = torch.ones_like(mismatch_N), torch.zeros_like(mismatch_N, dtype=torch.bool)
    if settings.tis_cap > 0.0:
        factor_N, clipped_N = mismatch_N.clamp(max=settings.tis_cap), mismatch_N > settings.tis_cap
        behaviour_N = trainer_N
    ratios_N = (new_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    terms_N = ratios_N * advantages_N
    if settings.kind == "ppo":
        bounded_N = ratios_N.clamp(settings.low, settings.high) * advantages_N
        clipped_N = clipped_N | (bounded_N < terms_N)
        terms_N = torch.minimum(terms_N, bounded_N)
    elif settings.kind == "cispo":
        weights_N = ratios_N.detach()
        clipped_N = clipped_N | (weights_N > settings.high)
        terms_N = weights_N.clamp(max=settings.high) * advantages_N * new_N
    return -(factor_N * terms_N).sum() / denominator, clipped_N.sum()
