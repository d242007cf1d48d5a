"""`[kl]` and `[entropy]`: what keeps the policy near its reference, and what keeps it from collapsing."""

from __future__ import annotations

from typing import Literal

from retrain.kernel.config.keys import Table, key


class KlTable(Table):
    """KL divergence of the policy from its reference, the model that training began with."""

    coef: float = key(0.0, "Weight of the KL divergence; 0 = off.", ge=0.0)
    where: Literal["loss", "reward"] = key(
        "loss", "A term of the loss, or taken off each completion's reward.", needs="kl.coef"
    )
    estimator: Literal["", "k1", "k2", "k3"] = key(
        "",
        "Estimate per token, with d = log p_ref - log p: k1 = -d, k2 = d²/2, k3 = e^d - 1 - d; empty = k3 in the "
        "loss, k1 in the reward.",
        needs="kl.coef",
    )
    target: float = key(0.0, "Mean KL per token that coef is steered to; 0 = coef is fixed.", ge=0.0)
    horizon: int = key(0, "Completions in which a steered coefficient changes by up to a fifth.", ge=0)
    log: bool = key(
        True,
        "Record kl_mean with coef = 0 too, from a sixteenth of the completions, where the backend has it cheaply.",
        free_on_resume=True,
    )


class EntropyTable(Table):
    """Terms against a collapse of the policy's entropy."""

    coef: float = key(0.0, "Weight of the entropy, which the loss then rewards; 0 = off.", ge=0.0)
    kl_cov: float = key(
        0.0,
        "Share of the action tokens, those of the highest covariance of log-probability and advantage, that are held "
        "near their old probability; 0 = off.",
        ge=0.0,
        le=1.0,
    )
    kl_cov_coef: float = key(1.0, "Weight of |log p - log p_old| at these tokens.", gt=0.0, needs="entropy.kl_cov")
    clip_cov: float = key(
        0.0,
        "Share of the action tokens, drawn among those of high covariance, that get no gradient; 0 = off.",
        ge=0.0,
        le=1.0,
    )
    clip_cov_low: float = key(
        1.0,
        "clip_cov draws among tokens whose covariance is above this.",
        allow_inf_nan=False,
        needs="entropy.clip_cov",
    )
    clip_cov_high: float = key(5.0, "And below this.", allow_inf_nan=False, needs="entropy.clip_cov")
