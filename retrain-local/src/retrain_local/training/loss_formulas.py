"""The policy losses of backend `local`, one function each.

With l = log p now - log p when sampled of one token, rho = exp(l), A its advantage, sg = no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retrain.api import LossClip, LossContext, LossSpec, LossTerms

MAX_LOG_RATIO = 20.0
LOG_SMALLEST_W = math.log(1e-8)  # of vespo, as in its authors' code
SMALLEST_P = 1e-30  # so that no logarithm is infinite


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


def luspo(ctx: LossContext) -> LossTerms:
    """T times gspo's term, with T the tokens of the sequence: no division by length, arXiv:2602.05261."""
    found = gspo(ctx)
    lengths_M = ctx.sequence_sum(torch.ones_like(ctx.advantages_M))
    return LossTerms(terms_M=lengths_M * found.terms_M, clipped_M=found.clipped_M)


def gmpo(ctx: LossContext) -> LossTerms:
    """A exp(mean of l' over the sequence), l' = min(l, clip(l, -eps, eps_high)), max if A < 0, arXiv:2507.20673."""
    logs_M = _logs(ctx)
    bounded_M = logs_M.clamp(-ctx.clip.eps, ctx.clip.eps_high)
    lower_M, higher_M = torch.minimum(logs_M, bounded_M), torch.maximum(logs_M, bounded_M)
    kept_M = torch.where(ctx.advantages_M > 0.0, lower_M, higher_M)
    return LossTerms(terms_M=ctx.advantages_M * ctx.sequence_mean(kept_M).exp(), clipped_M=kept_M != logs_M)


def sapo(ctx: LossContext) -> Tensor:
    """4 A sigmoid(tau (rho - 1)) / tau, a soft gate in place of a clip; its slope at rho = 1 is A, arXiv:2511.20347."""
    taus_M = _by_sign(ctx, ctx.params.tau_pos, ctx.params.tau_neg)
    return ctx.advantages_M * torch.sigmoid(taus_M * (ctx.ratios_M - 1.0)) * 4.0 / taus_M


def vespo(ctx: LossContext) -> Tensor:
    """sg(phi) A log p, phi = w^k exp(lambda (1 - w)), w the product of rho over the sequence, arXiv:2602.10693."""
    k_M = _by_sign(ctx, ctx.params.k_pos, ctx.params.k_neg)
    lambda_M = _by_sign(ctx, ctx.params.lambda_pos, ctx.params.lambda_neg)
    log_w_M = ctx.sequence_sum(_logs(ctx).detach()).clamp(LOG_SMALLEST_W, MAX_LOG_RATIO)
    phi_M = (lambda_M + k_M * log_w_M - lambda_M * log_w_M.exp()).exp()
    return phi_M * ctx.advantages_M * ctx.new_M


def dppo_tv(ctx: LossContext) -> LossTerms:
    """sg(min(rho, c)) A log p unless p has moved by more than d the way of A (binary TV), arXiv:2602.04879."""
    moved_M = ctx.new_M.detach().exp() - ctx.old_M.exp()
    return _trusted(ctx, torch.where(ctx.advantages_M > 0.0, moved_M, -moved_M) > ctx.params.divergence)


def dppo_kl(ctx: LossContext) -> LossTerms:
    """The same unless KL((p, 1 - p) when sampled, the same now) > d and the move is the way of A."""
    new_M, old_M = ctx.new_M.detach(), ctx.old_M
    others_M, others_old_M = (-torch.expm1(logs_M).clamp(max=-SMALLEST_P) for logs_M in (new_M, old_M))
    kl_M = old_M.exp() * (old_M - new_M) + others_old_M * (others_old_M / others_M).log()
    is_away_M = torch.where(ctx.advantages_M > 0.0, new_M > old_M, new_M < old_M)
    return _trusted(ctx, (kl_M > ctx.params.divergence) & is_away_M)


def m2po_drops(ctx: LossContext) -> Tensor:
    """The tokens with the largest l^2, as few as leave a mean l^2 below tau, but never all, arXiv:2510.01161.

    Equal ones are dropped together, so that the order of rows decides nothing. AReaL drops the same tokens; the
    authors' code clips, at one bound of |l|, those that have moved the way of A.
    """
    squares_M = _logs(ctx).double().square()
    ranked_M = squares_M.sort().values
    means_M = ranked_M.cumsum(0) / torch.arange(1, len(ranked_M) + 1, device=ranked_M.device)
    is_last_M = torch.cat([ranked_M[1:] > ranked_M[:-1], torch.ones_like(ranked_M[:1], dtype=torch.bool)])
    kept_M = ranked_M[(means_M < ctx.params.tau) & is_last_M]
    return squares_M > (kept_M[-1] if len(kept_M) else ranked_M[0])


def dro(ctx: LossContext) -> Tensor:
    """A log p - beta l^2 / 2: no ratio, but a pull back to the policy that sampled."""
    return ctx.advantages_M * ctx.new_M - 0.5 * ctx.params.beta * (ctx.new_M - ctx.old_M).square()


def likelihood(ctx: LossContext) -> Tensor:
    """A log p: for given answers, A = 1, maximum likelihood; for samples, REINFORCE."""
    return ctx.advantages_M * ctx.new_M


def _logs(ctx: LossContext) -> Tensor:
    logs_M: Tensor = ctx.new_M - ctx.old_M
    return logs_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _by_sign(ctx: LossContext, positive: float, other: float) -> Tensor:
    return torch.full_like(ctx.advantages_M, other).masked_fill(ctx.advantages_M > 0.0, positive)


def _trusted(ctx: LossContext, left_M: Tensor) -> LossTerms:
    """sg(min(rho, c)) A log p, and 0 for tokens that have left the trust region."""
    ratios_M, cap = ctx.ratios_M.detach(), ctx.params.ratio_cap
    weights_M = ratios_M.clamp(max=cap).masked_fill(left_M, 0.0)
    return LossTerms(terms_M=weights_M * ctx.advantages_M * ctx.new_M, clipped_M=left_M | (ratios_M > cap))


def _clipped(ratios_M: Tensor, ctx: LossContext) -> LossTerms:
    terms_M = ratios_M * ctx.advantages_M
    bounded_M = ratios_M.clamp(1.0 - ctx.clip.eps, 1.0 + ctx.clip.eps_high) * ctx.advantages_M
    return LossTerms(terms_M=torch.minimum(terms_M, bounded_M), clipped_M=bounded_M < terms_M)


IMPORTANCE_SAMPLING = LossSpec(name="importance_sampling", compute=importance_sampling)
PPO = LossSpec(name="ppo", compute=ppo, clip=LossClip(eps=0.2))
CISPO = LossSpec(name="cispo", compute=cispo, clip=LossClip(eps_high=4.0), stops_gradient=True)
LIKELIHOOD = LossSpec(name="likelihood", compute=likelihood)
GSPO = LossSpec(name="gspo", compute=gspo, clip=LossClip(eps=3e-4, eps_high=4e-4), aggregation="sequence_mean")
LUSPO = LossSpec(name="luspo", compute=luspo, clip=GSPO.clip, aggregation="sequence_mean")
GMPO = LossSpec(name="gmpo", compute=gmpo, clip=LossClip(eps=0.4, eps_high=0.4), aggregation="sequence_mean")
SAPO = LossSpec(name="sapo", compute=sapo, aggregation="sequence_mean")
VESPO = LossSpec(name="vespo", compute=vespo, stops_gradient=True)
DPPO_TV = LossSpec(name="dppo_tv", compute=dppo_tv, stops_gradient=True)
DPPO_KL = LossSpec(name="dppo_kl", compute=dppo_kl, stops_gradient=True)
M2PO = LossSpec(name="m2po", compute=importance_sampling, drops=m2po_drops)
DRO = LossSpec(name="dro", compute=dro)
