"""Episode advantages: one number per completion, from the rewards of its group alone."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np

from retrain.advantages import AdvantageContext, AdvantageSpec
from retrain.api import Floats, Table, key

STD_EPS = 1e-4
MAXRL_EPS = 1e-6
log = logging.getLogger("retrain.credit")


class GrpoParams(Table):
    """`[algorithm.advantage_params]` of grpo."""

    scale: Literal["", "std"] = key("", 'Divide by the standard deviation of the group: "std"; empty = no.')
    ddof: Literal[0, 1] = key(0, "1 = Bessel's correction of that standard deviation.")


class MaxrlParams(Table):
    """`[algorithm.advantage_params]` of maxrl."""

    eps: float = key(MAXRL_EPS, "Added to the mean; a group whose mean is not above it gets zeros.", gt=0.0)


def grpo_advantages(rewards_G: Floats, *, scale: str = "", ddof: int = 0) -> Floats:
    """Group-centred reward: A_i = r_i - mean r, `[G]`; zeros for one member or equal rewards.

    `scale="std"` divides by (std + 1e-4), std with `ddof` degrees of freedom removed: DeepSeekMath (arXiv:2402.03300)
    with ddof 0, TRL with 1. The default has no division, which is the numerator of Dr. GRPO (arXiv:2503.20783), and
    neither has a KL term.
    """
    if rewards_G.size < 2 or rewards_G.min() == rewards_G.max():  # exact zeros: a rounded mean would leave a residue
        return np.zeros(rewards_G.shape)
    centred_G: Floats = rewards_G - rewards_G.mean()
    if scale == "std":
        centred_G = centred_G / (rewards_G.std(ddof=ddof) + STD_EPS)
    return centred_G


def rloo_advantages(rewards_G: Floats) -> Floats:
    """REINFORCE leave-one-out: A_i = r_i - mean of the others = G/(G-1) (r_i - mean r), `[G]` (arXiv:2402.14740).

    Zeros for one member or equal rewards.
    """
    return grpo_advantages(rewards_G) * (rewards_G.size / max(rewards_G.size - 1, 1))


def maxrl_advantages(rewards_G: Floats, *, eps: float = MAXRL_EPS) -> Floats:
    """Maximum-likelihood RL: A_i = (r_i - m) / (m + eps), m = mean r, `[G]` (arXiv:2602.02710).

    Zeros when m <= eps, for one member, and for equal rewards. With K of G right, a right answer gets (G-K)/K and a
    wrong one -1. Meant for rewards in [0, 1]. Differs from the authors' code, where a group of one gets 1/eps.
    """
    if rewards_G.size < 2 or rewards_G.min() == rewards_G.max():
        return np.zeros(rewards_G.shape)
    mean = rewards_G.mean()
    return np.zeros(rewards_G.shape) if mean <= eps else (rewards_G - mean) / (mean + eps)


def maxrl() -> AdvantageSpec:
    """The `maxrl` advantage of one run; it warns once when a reward lies outside [0, 1]."""
    warned = False

    def compute(ctx: AdvantageContext) -> Floats:
        nonlocal warned
        outside_G = ctx.rewards_G[(ctx.rewards_G < 0.0) | (ctx.rewards_G > 1.0)]
        if outside_G.size and not warned:
            warned = True
            log.warning(
                "maxrl: reward %g lies outside [0, 1]. MaxRL is derived for rewards in that range: negative ones can "
                'blow up or zero its advantages. Rescale the reward, or use advantage_mode = "grpo".',
                outside_G[0],
            )
        return maxrl_advantages(ctx.rewards_G, eps=float(ctx.params.get("eps", MAXRL_EPS)))

    return AdvantageSpec(name="maxrl", compute=compute, needs_group=True)


def _grpo(ctx: AdvantageContext) -> Floats:
    scale, ddof = str(ctx.params.get("scale", "")), int(ctx.params.get("ddof", 0))
    return grpo_advantages(ctx.rewards_G, scale=scale, ddof=ddof)


GRPO = AdvantageSpec(name="grpo", compute=_grpo, needs_group=True)
RLOO = AdvantageSpec(name="rloo", compute=lambda ctx: rloo_advantages(ctx.rewards_G), needs_group=True)
DR_GRPO = AdvantageSpec(name="dr_grpo", compute=lambda ctx: grpo_advantages(ctx.rewards_G), needs_group=True)
