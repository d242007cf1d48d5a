"""Algorithm `{{ cookiecutter.name }}`: centred rewards, the same for every token of a completion."""

from __future__ import annotations

import numpy as np
from retrain.advantages import AlgorithmSpec, TransformContext, TransformOutput


def centred(ctx: TransformContext) -> TransformOutput:
    """A_i = r_i - mean r, not divided by the standard deviation of the rewards (Dr. GRPO, arXiv:2503.20783)."""
    advantages_G = ctx.rewards_G - ctx.rewards_G.mean()
    token_advs = [
        np.full(len(logprobs_T), advantage) for advantage, logprobs_T in zip(advantages_G, ctx.logprobs_G, strict=True)
    ]
    return TransformOutput(token_advs=token_advs, metrics={"dr_grpo_spread": float(ctx.rewards_G.std())})


SPEC = AlgorithmSpec(name="{{ cookiecutter.name }}", compute_context=centred)
