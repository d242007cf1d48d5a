"""Loss `{{ cookiecutter.name }}`: a smooth gate in place of PPO's clip."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from retrain.api import LossContext, LossSpec, LossTerms{% if cookiecutter.form == "file" %}, LossTraits, PluginSpec{% endif %}



class Params(BaseModel):
    """`[algorithm.loss_params]`: how fast the gate closes, for tokens with positive and with negative advantages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tau_good: float = Field(default=1.0, gt=0.0)
    tau_bad: float = Field(default=1.05, gt=0.0)


def soft_gate(ctx: LossContext) -> LossTerms:
    """4 / tau sigmoid(tau (rho - 1)) A per token (SAPO, arXiv:2511.20347); clipped: gates that are half closed."""
    params = ctx.params if isinstance(ctx.params, Params) else Params()
    tau_M = torch.where(ctx.advantages_M > 0.0, params.tau_good, params.tau_bad).to(ctx.new_M)
    open_M = torch.sigmoid(tau_M * (ctx.ratios_M - 1.0))
    slope_M = 4.0 * open_M * (1.0 - open_M)  # of the gate, 1 on policy
    return LossTerms(terms_M=4.0 / tau_M * open_M * ctx.advantages_M, clipped_M=slope_M < 0.5)


SPEC = LossSpec(name="{{ cookiecutter.name }}", compute=soft_gate)
{% if cookiecutter.form == "file" %}
PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=SPEC,
    params=Params,
    traits=LossTraits(backends=frozenset({"local"})),
)
{% endif %}
