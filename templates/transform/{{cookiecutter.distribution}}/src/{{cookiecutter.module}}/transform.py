"""Transform `{{ cookiecutter.name }}`: confident tokens keep a minimum of credit."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from retrain.advantages import TransformContext, TransformOutput, TransformSpec, gtpo_weights
from retrain.api import Floats{% if cookiecutter.form == "file" %}, PluginSpec{% endif %}



class Params(BaseModel):
    """`[algorithm.transform_params]`: the floor as a fraction of the completion's mean uncertainty, in [0, 1]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    floor: float = Field(default=0.5, ge=0.0, le=1.0)


def entropy_floor(uncertainty_T: Floats, floor: float) -> Floats:
    """U'_T = max(U_T, floor * mean U): no token's uncertainty falls below a fraction of the mean."""
    if uncertainty_T.size == 0:
        return uncertainty_T
    lifted_T: Floats = np.maximum(uncertainty_T, floor * uncertainty_T.mean())
    return lifted_T


def credit(ctx: TransformContext) -> TransformOutput:
    """A_i w_T for each completion i, with w the GTPO weights of the raised uncertainties."""
    floor = Params.model_validate(ctx.params).floor
    lifted_G = [entropy_floor(uncertainty_T, floor) for uncertainty_T in ctx.uncertainties_G]
    token_advs = [
        advantage * gtpo_weights(lifted_T, ctx.gtpo_beta)
        for advantage, lifted_T in zip(ctx.advantages_G, lifted_G, strict=True)
    ]
    pairs = zip(lifted_G, ctx.uncertainties_G, strict=True)
    num_lifted = sum(int(np.count_nonzero(lifted_T > before_T)) for lifted_T, before_T in pairs)
    num_tokens = sum(uncertainty_T.size for uncertainty_T in ctx.uncertainties_G)
    return TransformOutput(token_advs=token_advs, metrics={"floor_lifted_frac": num_lifted / max(num_tokens, 1)})


SPEC = TransformSpec(name="{{ cookiecutter.name }}", use_gtpo=True, compute_context=credit)
{% if cookiecutter.form == "file" %}
PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=SPEC,
    params=Params,
)
{% endif %}
