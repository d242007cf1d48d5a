"""Advantages: one number per completion from the rewards of its group or step, or one per token from a teacher.

`_PG` one array per group, with one entry per completion; `_N` one entry per completion of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from retrain.advantages import AdvantageContext, AdvantageSpec, StepAdvantageContext, TokenAdvantageContext
from retrain.api import CreditError, Floats, Problem, Table, Tokens, key

STD_EPS = 1e-4
MAXRL_EPS = 1e-6
PASSK_EPS = 1e-6
REINFORCE_EPS = 1e-8
log = logging.getLogger("retrain.credit")


class GrpoParams(Table):
    scale: Literal["", "std"] = key("", 'Divide by the standard deviation of the group: "std"; empty = no.')
    ddof: Literal[0, 1] = key(0, "1 = Bessel's correction of that standard deviation.")


class PasskParams(Table):
    scale: Literal["", "std"] = key("", 'Divide by the standard deviation of the group, ddof 1: "std"; empty = no.')


class MaxrlParams(Table):
    eps: float = key(MAXRL_EPS, "Added to the mean; a group whose mean is not above it gets zeros.", gt=0.0)


def grpo_advantages(rewards_G: Floats, *, scale: str = "", ddof: int = 0) -> Floats:
    """Group-centred reward: A_i = r_i - mean r, `[G]`; zeros for one member or equal rewards.

    `scale="std"` divides by (std + 1e-4), std with `ddof` degrees of freedom removed: DeepSeekMath (arXiv:2402.03300)
    with ddof 0, TRL with 1. The default has no division, as the numerator of Dr. GRPO (arXiv:2503.20783); neither has
    a KL term.
    """
    # Exact zeros: the mean of equal rewards is rounded, and the residue over a tiny deviation would be credit.
    if rewards_G.size < 2 or rewards_G.min() == rewards_G.max():
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


def passk_advantages(rewards_G: Floats, *, scale: str = "") -> Floats:
    """Pass@k: the best completion gets its lead over the second best, the others 0, `[G]` (arXiv:2503.19595).

    Zeros for one member, and where several are best. `scale="std"` divides by (std + 1e-6), ddof 1, as verl does.
    """
    advantages_G = np.zeros(rewards_G.shape)
    if rewards_G.size < 2:
        return advantages_G
    second, best = np.partition(rewards_G, -2)[-2:]
    advantages_G[rewards_G.argmax()] = (best - second) / (rewards_G.std(ddof=1) + PASSK_EPS if scale == "std" else 1.0)
    return advantages_G


def opo_advantages(rewards_G: Floats, lengths_G: Tokens) -> Floats:
    """Reward minus the mean of the group weighted by length: A_i = r_i - sum T_j r_j / sum T_j (arXiv:2505.23585).

    Zeros for one member or equal rewards.
    """
    if rewards_G.size < 2 or rewards_G.min() == rewards_G.max() or not lengths_G.any():
        return np.zeros(rewards_G.shape)
    return rewards_G - float(lengths_G @ rewards_G) / float(lengths_G.sum())


def remax_advantages(rewards_PG: Sequence[Floats], greedy_P: Floats) -> list[Floats]:
    """ReMax: reward minus the greedy completion's of the same prompt (arXiv:2310.10505); zeros where that is NaN."""
    pairs = zip(rewards_PG, greedy_P, strict=True)
    return [np.zeros(rewards_G.shape) if np.isnan(greedy) else rewards_G - greedy for rewards_G, greedy in pairs]


def otb_advantages(rewards_G: Floats, logprobs_G: Sequence[Floats], squared_probs_G: Sequence[Floats]) -> list[Floats]:
    """Reward minus the optimal token baseline of the group, one array per completion, as verl has it.

    B_t = sum_i r_i W_it / sum_i W_it over the completions that are longer than t. W_it = sum_{u <= t} (1 - 2 p_iu +
    sum_v p_iuv^2) is the squared norm of the score of its first tokens. B_t = 0 if one completion is left, or all W are
    0.
    """
    lengths_G = np.array([len(each) for each in logprobs_G], dtype=np.int64)
    weights_GT = np.zeros((len(lengths_G), int(lengths_G.max(initial=0))))
    for row, (logprobs_T, squares_T) in enumerate(zip(logprobs_G, squared_probs_G, strict=True)):
        # A certain token has a score of 0, and rounding would make it negative.
        norms_T = np.maximum(1.0 - 2.0 * np.exp(logprobs_T) + squares_T, 0.0)
        weights_GT[row, : len(logprobs_T)] = np.cumsum(norms_T)
    totals_T, left_T = weights_GT.sum(0), (lengths_G[:, None] > np.arange(weights_GT.shape[1])).sum(0)
    baselines_T = np.zeros(weights_GT.shape[1])
    np.divide(rewards_G @ weights_GT, totals_T, out=baselines_T, where=(totals_T > 0.0) & (left_T > 1))
    return [reward - baselines_T[:length] for reward, length in zip(rewards_G, lengths_G, strict=True)]


def maxrl() -> AdvantageSpec:
    """Return the `maxrl` advantage of one run; it warns once when a reward is outside [0, 1]."""
    warned = False

    def compute(ctx: AdvantageContext) -> Floats:
        nonlocal warned
        outside_G = ctx.rewards_G[(ctx.rewards_G < 0.0) | (ctx.rewards_G > 1.0)]
        if outside_G.size and not warned:
            warned = True
            log.warning(
                "maxrl: reward %g is outside [0, 1]. MaxRL is derived for rewards in that range: negative ones can "
                'blow up or zero its advantages. Rescale the reward, or use advantage_mode = "grpo".',
                outside_G[0],
            )
        return maxrl_advantages(ctx.rewards_G, eps=float(ctx.params.get("eps", MAXRL_EPS)))

    return AdvantageSpec(name="maxrl", compute=compute, needs_group=True)


def _grpo(ctx: AdvantageContext) -> Floats:
    scale, ddof = str(ctx.params.get("scale", "")), int(ctx.params.get("ddof", 0))
    return grpo_advantages(ctx.rewards_G, scale=scale, ddof=ddof)


MAXRL = maxrl  # a factory: each run warns once
GRPO = AdvantageSpec(name="grpo", compute=_grpo, needs_group=True)
RLOO = AdvantageSpec(name="rloo", compute=lambda ctx: rloo_advantages(ctx.rewards_G), needs_group=True)
PASSK = AdvantageSpec(
    name="passk",
    compute=lambda ctx: passk_advantages(ctx.rewards_G, scale=str(ctx.params.get("scale", ""))),
    needs_group=True,
)
DR_GRPO = AdvantageSpec(name="dr_grpo", compute=lambda ctx: grpo_advantages(ctx.rewards_G), needs_group=True)


class BaselineParams(Table):
    weight: Literal["completions", "tokens"] = key(
        "completions", "Mean and deviation over completions, or over their tokens, as verl does."
    )


class GdpoParams(Table):
    weights: dict[str, float] = key(
        {}, "Rewards by name with their weights; empty = [reward.weights], or without it their sum as the only reward."
    )
    ddof: Literal[0, 1] = key(1, "1 = Bessel's correction of the standard deviations, as TRL does.")


def reinforce_pp_advantages(rewards_PG: Sequence[Floats]) -> list[Floats]:
    """REINFORCE++: A = (r - mean) / (std + 1e-8), over all completions of the step, ddof 0 (arXiv:2501.03262).

    No group baseline: a group whose rewards are all equal has an advantage, unless all of the step are equal.
    """
    return [_scaled(rewards_G, *_moments(rewards_PG), REINFORCE_EPS) for rewards_G in rewards_PG]


def reinforce_pp_baseline_advantages(
    rewards_PG: Sequence[Floats], lengths_PG: Sequence[Tokens], *, weight: str = "completions"
) -> list[Floats]:
    """REINFORCE++ with the group's mean as baseline: c = r - mean_group, A = (c - mean(c)) / (std(c) + 1e-8).

    The deviation has ddof 0. Over completions mean(c) is 0: a group whose rewards are all equal gets exact zeros.
    `weight="tokens"` takes both over the step's tokens, each carrying the c of its completion, as verl (with ddof 1)
    and the public retrain package do. Then mean(c) is not 0 where right and wrong answers differ in length, and every
    completion, of whatever group, gets its share of it.
    """
    centred_PG = [grpo_advantages(rewards_G) for rewards_G in rewards_PG]
    if weight == "completions":
        _, std = _moments(centred_PG)
        return [_scaled(centred_G, 0.0, std, REINFORCE_EPS) for centred_G in centred_PG]
    lengths_N, centred_N = _flat(lengths_PG), _flat(centred_PG)
    if not centred_N.any():
        return centred_PG
    shares_N = lengths_N / max(lengths_N.sum(), 1.0)
    mean = float((shares_N * centred_N).sum())
    std = float(np.sqrt((shares_N * (centred_N - mean) ** 2).sum()))
    return [_scaled(centred_G, mean, std, REINFORCE_EPS) for centred_G in centred_PG]


def gdpo_advantages(
    rewards_PG: Sequence[Floats],
    named_PG: Sequence[Mapping[str, Floats]],
    shaping_PG: Sequence[Floats] = (),
    *,
    weights: Mapping[str, float],
    ddof: int = 1,
) -> list[Floats]:
    """Group-decoupled normalisation (GDPO): x = sum_k w_k (r_k - mean_group) / (std_group + 1e-4) over the rewards k.

    Then A = (x - mean) / (std + 1e-4) over the step: a reward with a large spread does not drown the others, as it does
    in a plain sum. The additions of shapers, `shaping_PG`, less their mean in the group, are added to x unscaled.
    Without `weights` the sum `rewards_PG` is the only reward. CreditError for a name that a completion lacks.
    """
    summed_PG = []
    for number, (rewards_G, named) in enumerate(zip(rewards_PG, named_PG, strict=True)):
        total_G = np.zeros(rewards_G.shape)
        missing = [name for name in weights if name not in named]
        if missing and rewards_G.size:
            what = f"gdpo: group {number} has completions without a reward {missing[0]!r}; all have {sorted(named)}"
            fix = "name other rewards in [algorithm.advantage_params] weights"
            raise CreditError(Problem(code="credit.reward-missing", what=what, fix=fix))
        if rewards_G.size:
            parts = [(weight, named[name]) for name, weight in weights.items()] or [(1.0, rewards_G)]
            for weight, part_G in parts:
                total_G += weight * grpo_advantages(part_G, scale="std", ddof=ddof)
            if weights and shaping_PG:
                total_G += grpo_advantages(shaping_PG[number])
        summed_PG.append(total_G)
    _, std = _moments(summed_PG, ddof=ddof)  # each group sums to 0, and so does the step
    return [_scaled(total_G, 0.0, std, STD_EPS) for total_G in summed_PG]


def _flat(values_PG: Sequence[Floats] | Sequence[Tokens]) -> Floats:
    return np.concatenate([np.zeros(0), *values_PG])


def _moments(values_PG: Sequence[Floats], *, ddof: int = 0) -> tuple[float, float]:
    """Return mean and standard deviation over the step; the latter is exactly 0 when all values are equal."""
    flat_N = _flat(values_PG)
    if flat_N.size < 2 or flat_N.min() == flat_N.max():
        return (float(flat_N[0]) if flat_N.size else 0.0), 0.0
    return float(flat_N.mean()), float(flat_N.std(ddof=ddof))


def _scaled(values_G: Floats, mean: float, std: float, eps: float) -> Floats:
    return (values_G - mean) / (std + eps) if std > 0.0 else np.zeros(values_G.shape)


def _baseline(step: StepAdvantageContext) -> list[Floats]:
    weight = str(step.params.get("weight", "completions"))
    return reinforce_pp_baseline_advantages(step.rewards_PG, step.lengths_PG, weight=weight)


def _gdpo(step: StepAdvantageContext) -> list[Floats]:
    """Take the sum as the only reward if no completion of the step has named rewards."""
    several = step.reward_weights if len(step.reward_weights) > 1 else {}
    weights = (step.params.get("weights") or several) if any(step.named_rewards_PG) else {}
    ddof = int(step.params.get("ddof", 1))
    return gdpo_advantages(step.rewards_PG, step.named_rewards_PG, step.shaping_PG, weights=weights, ddof=ddof)


REINFORCE_PP = AdvantageSpec(name="reinforce_pp", compute_step=lambda step: reinforce_pp_advantages(step.rewards_PG))
REINFORCE_PP_BASELINE = AdvantageSpec(name="reinforce_pp_baseline", compute_step=_baseline, needs_group=True)
GDPO = AdvantageSpec(name="gdpo", compute_step=_gdpo, needs_group=True)
OPO = AdvantageSpec(
    name="opo", compute_step=lambda step: list(map(opo_advantages, step.rewards_PG, step.lengths_PG)), needs_group=True
)
REMAX = AdvantageSpec(
    name="remax", compute_step=lambda step: remax_advantages(step.rewards_PG, step.greedy_P), needs_greedy=True
)


class DistillationParams(Table):
    coef: float = key(1.0, "Multiplies every advantage.", gt=0.0)
    discount: float = key(0.0, "Weight of the next token's return; 0 = each token for itself.", ge=0.0, le=1.0)


def returns(rewards_T: Floats, discount: float) -> Floats:
    """R_t = r_t + discount R_(t+1), `[T]`."""
    if discount == 0.0:
        return rewards_T
    result_T, ahead = np.empty(len(rewards_T)), 0.0
    for position in range(len(rewards_T) - 1, -1, -1):
        ahead = result_T[position] = float(rewards_T[position]) + discount * ahead
    return result_T


def _distillation(ctx: TokenAdvantageContext) -> list[Floats]:
    coef, discount = float(ctx.params.get("coef", 1.0)), float(ctx.params.get("discount", 0.0))
    return [coef * returns(rewards_T, discount) for rewards_T in ctx.token_rewards_G]


def _otb(ctx: TokenAdvantageContext) -> list[Floats]:
    assert ctx.rewards_G is not None, "it needs a verdict"
    return otb_advantages(ctx.rewards_G, ctx.logprobs_G, ctx.squared_probs_G)


OTB = AdvantageSpec(name="otb", compute_tokens=_otb, needs_group=True, needs_squared_probs=True)
DISTILLATION = AdvantageSpec(
    name="distillation", compute_tokens=_distillation, needs_token_rewards=True, needs_verdict=False
)
