"""Uncertainty `{{ cookiecutter.name }}`: the probability of all tokens except the sampled one."""

from __future__ import annotations

import numpy as np
from retrain.advantages import UncertaintyContext, UncertaintySpec
from retrain.api import Floats


def missing_mass(ctx: UncertaintyContext) -> Floats:
    """U_T = 1 - p_T, in [0, 1); exact even for p near 1, where 1 - exp(log p) would round to 0."""
    return -np.expm1(np.minimum(ctx.logprobs_T, 0.0))


SPEC = UncertaintySpec(name="{{ cookiecutter.name }}", compute=missing_mass)
