"""Algorithms of the field as recipes: defaults for `[algorithm]` and `[training]` under the name of the paper.

Each sets advantage, loss, clipping and aggregation of its source, and whatever else the source makes part of the
algorithm. Temperature, learning rate, group size, the number of updates and a KL penalty are left to the user: papers
choose them for their models.
"""

from __future__ import annotations

from typing import Any


def _algorithm(**keys: Any) -> dict[str, Any]:
    return {f"algorithm.{key}": value for key, value in keys.items()}


# (r - mean) / (std + 1e-4) with Bessel's correction, as in TRL; every token gets its completion's advantage.
GROUP_STD = _algorithm(advantage_mode="grpo", advantage_params={"scale": "std", "ddof": 1}, transform_mode="none")
PPO = _algorithm(loss="ppo", clip_eps=0.2)

# DeepSeekMath, arXiv:2402.03300, equation 3; its KL term, coefficient 0.04, is `[kl]`'s.
GRPO = GROUP_STD | PPO | _algorithm(aggregation="sequence_mean")

# arXiv:2503.20783, section 3.2: neither the deviation nor the length of a completion divides anything.
DR_GRPO = _algorithm(advantage_mode="dr_grpo", transform_mode="none") | PPO | _algorithm(aggregation="constant")

# arXiv:2503.14476, section 3: clip-higher, dynamic sampling (ten rounds of prompts at most, as in verl's scripts), loss
# by token, filtered truncation. Its soft punishment, whose zone is a fifth of the longest completion, is left out.
DAPO = {
    **GROUP_STD,
    **PPO,
    **_algorithm(clip_eps_high=0.28, aggregation="token_mean"),
    "training.overlong": "mask",
    "training.refill": 9,
}

# arXiv:2507.18071, equation 5 and section 5.1: ratio, clip and mean by sequence.
GSPO = GROUP_STD | _algorithm(loss="gspo", clip_eps=3e-4, clip_eps_high=4e-4, aggregation="sequence_mean")

# MiniMax-M1, arXiv:2506.13585, section 3.1. It does not say where its weights are capped: the default cap of the loss.
CISPO = GROUP_STD | _algorithm(loss="cispo", aggregation="token_mean")

# arXiv:2402.14740, section 3: REINFORCE on whole completions, whose log-probability is a sum and not a mean.
RLOO = _algorithm(advantage_mode="rloo", transform_mode="none", loss="importance_sampling", aggregation="constant")

# arXiv:2501.03262: PPO's loss, advantages normalised over the whole step; the variant takes off the group's mean first.
REINFORCE_PP = DR_GRPO | _algorithm(advantage_mode="reinforce_pp", aggregation="token_mean")
REINFORCE_PP_BASELINE = REINFORCE_PP | _algorithm(advantage_mode="reinforce_pp_baseline")

# Only the loss and its average differ from GRPO's; constants are the defaults of each loss.
SAPO = GROUP_STD | _algorithm(loss="sapo", aggregation="sequence_mean")
GMPO = GROUP_STD | _algorithm(loss="gmpo", aggregation="sequence_mean")
LUSPO = GSPO | _algorithm(loss="luspo")
VESPO = GROUP_STD | _algorithm(loss="vespo", aggregation="token_mean")
DPPO_TV = VESPO | _algorithm(loss="dppo_tv")
DPPO_KL = VESPO | _algorithm(loss="dppo_kl")
M2PO = VESPO | _algorithm(loss="m2po")
DRO = VESPO | _algorithm(loss="dro")

# IcePop, arXiv:2510.18855: a token counts while the trainer's probability is 0.5 to 5 times the sampler's.
ICEPOP = GROUP_STD | PPO | _algorithm(aggregation="token_mean", is_mode="mask", is_bounds=[0.5, 5.0])

# TRL 1.16's SDPOConfig and SDFTConfig; the other values are the defaults of [distil].
SDPO = {**_algorithm(advantage_mode="distillation", transform_mode="none"), "distil.teacher": "ema"}
SDFT = {
    **SDPO,
    "distil.teacher": "base",
    "distil.template": "{prompt}\n\n{privileged}",
    "distil.mode": "topk",
    "distil.alpha": 0.5,
}
