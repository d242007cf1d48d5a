"""On-policy distillation: the advantage of a token is what a teacher says of it."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from retrain.advantages import AdvantageSpec, TokenAdvantageContext
from retrain.api import Config, Floats, Problem

NAME = "distillation"
SEQUENCE_LOSS = "gspo"


class DistillationParams(BaseModel):
    """`[algorithm.advantage_params]` of `distillation`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    coef: float = Field(default=1.0, gt=0.0, description="Multiplies every advantage.")
    discount: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Weight of the next token's return; 0 = each token for itself."
    )


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


def problems_of(config: Config) -> list[Problem]:
    """`distillation` without a teacher, and with a loss that gives all tokens of a completion one ratio."""
    if config.algorithm.advantage_mode != NAME or config.algorithm.algorithm_mode:
        return []
    problems = []
    names = (config.value(f"teacher.{name}", "") for name in ("model", "adapter"))
    if not any(names) and config.teacher.engine == "pytorch":
        what, why = "nobody teaches", "advantage 'distillation' takes its rewards from the model of [teacher]"
        fix = "set [teacher] model, adapter or engine"
        problems.append(Problem(where=config.place("algorithm.advantage_mode"), what=what, why=why, fix=fix))
    if config.algorithm.loss == SEQUENCE_LOSS:
        what, why = (
            "gspo does not go with 'distillation'",
            "its one ratio per completion gives every token the same share",
        )
        where, fix = config.place("algorithm.loss"), 'use loss = "importance_sampling", "ppo" or "cispo"'
        problems.append(Problem(where=where, what=what, why=why, fix=fix))
    return problems


DISTILLATION = AdvantageSpec(name=NAME, compute_tokens=_distillation, needs_token_rewards=True, needs_verdict=False)
