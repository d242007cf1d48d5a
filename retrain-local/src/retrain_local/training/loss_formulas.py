"""The policy losses of backend `local`: importance_sampling, ppo, cispo, gspo, likelihood.

With rho = exp(log p now - log p when sampled) of one token, A its advantage, sg = no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrain.api import LossClip, LossContext, LossSpec, LossTerms

MAX_LOG_RATIO = 20.0


def importance_sampling(ctx: LossContext) -> Tensor:
    """rho A."""
    return ctx.ratios_M * ctx.advantages_M


def ppo(ctx: LossContext) -> LossTerms:
    """min(rho A, clip(rho, 1 - eps, 1 + eps_high) A), arXiv:1707.06347; eps_high > eps: DAPO, arXiv:2503.14476.

    With `dual` = c > 1 a term with A < 0 is not below c A (dual clip, arXiv:1912.09729).
    """
    terms = _clipped(ctx.ratios_M, ctx)
    if ctx.clip.dual <= 0.0:
        return terms
    floor_M = ctx.clip.dual * ctx.advantages_M
    is_below_M = (ctx.advantages_M < 0.0) & (terms.terms_M < floor_M)
    return LossTerms(terms_M=torch.where(is_below_M, floor_M, terms.terms_M), clipped_M=terms.clipped_M | is_below_M)


def cispo(ctx: LossContext) -> LossTerms:
    """sg(min(rho, eps_high)) A log p, arXiv:2506.13585: a clipped token keeps its gradient, at the cap."""
    weights_M = ctx.ratios_M.detach()
    terms_M = weights_M.clamp(max=ctx.clip.eps_high) * ctx.advantages_M * ctx.new_M
    return LossTerms(terms_M=terms_M, clipped_M=weights_M > ctx.clip.eps_high)


def gspo(ctx: LossContext) -> LossTerms:
    """min(s A, clip(s, 1 - eps, 1 + eps_high) A) with s = exp(mean of log rho over the sequence), arXiv:2507.18071."""
    means_M = ctx.sequence_mean(ctx.new_M - ctx.old_M)
    return _clipped(means_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), ctx)


def likelihood(ctx: LossContext) -> Tensor:
    """A log p: for given answers, A = 1, maximum likelihood; for samples, REINFORCE."""
    return ctx.advantages_M * ctx.new_M


def _clipped(ratios_M: Tensor, ctx: LossContext) -> LossTerms:
    terms_M = ratios_M * ctx.advantages_M
    bounded_M = ratios_M.clamp(1.0 - ctx.clip.eps, 1.0 + ctx.clip.eps_high) * ctx.advantages_M
    return LossTerms(terms_M=torch.minimum(terms_M, bounded_M), clipped_M=bounded_M < terms_M)


IMPORTANCE_SAMPLING = LossSpec(name="importance_sampling", compute=importance_sampling)
PPO = LossSpec(name="ppo", compute=ppo, clip=LossClip(eps=0.2))
CISPO = LossSpec(name="cispo", compute=cispo, clip=LossClip(eps_high=4.0), stops_gradient=True)
LIKELIHOOD = LossSpec(name="likelihood", compute=likelihood)
GSPO = LossSpec(name="gspo", compute=gspo, clip=LossClip(eps=3e-4, eps_high=4e-4), aggregation="sequence_mean")
