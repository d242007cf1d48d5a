"""Token transforms: SEPA pooling, the stages that each transform uses, and the five conditions of the paper."""

from __future__ import annotations

import numpy as np

from retrain.advantages import AlgorithmSpec, CreditStage, TransformSpec
from retrain.api import Config, CreditError, Floats, Mask, Problem
from retrain_sepa.tables import GtpoTable, HicraTable
from retrain_sepa.weights import amplify_planning, gtpo_weights, top_rho_threshold


def pool_execution(uncertainty_T: Floats, planning_T: Mask, sepa_lambda: float) -> Floats:
    """SEPA: pull the uncertainty of execution tokens towards their mean, within one completion.

    U'_t = lambda mean(U over execution tokens) + (1 - lambda) U_t where `planning_T` is False; planning tokens keep
    theirs. lambda is clamped to [0, 1]. Both means are preserved, so the GTPO weights of planning tokens do not depend
    on lambda; the variance over execution tokens is multiplied by (1 - lambda)^2. Returns a new array `[T]`, equal to
    the input when lambda = 0 or there is no execution token. CreditError for unequal lengths or a lambda that is NaN.
    Selective Entropy Pooling with Annealing (Millet); attention plays no part in it.
    """
    if uncertainty_T.shape != planning_T.shape:
        lengths = f"{len(planning_T)} entries for {len(uncertainty_T)} tokens"
        raise CreditError(Problem(what=f"planning mask has {lengths}", fix="give one entry per token"))
    if np.isnan(sepa_lambda):
        raise CreditError(Problem(what="lambda is not a number", fix="give one in [0, 1]"))
    strength = min(max(sepa_lambda, 0.0), 1.0)
    weights_T = 1.0 - planning_T  # products and sums are several times faster than boolean indexing
    count = weights_T.sum()
    if strength == 0.0 or count == 0.0:
        return np.array(uncertainty_T, dtype=np.float64)
    weights_T *= uncertainty_T
    pooled_T = uncertainty_T * (1.0 - strength)
    pooled_T += strength * weights_T.sum() / count
    np.copyto(pooled_T, uncertainty_T, where=planning_T)
    return pooled_T


def _beta(config: Config) -> float:
    return config.table("gtpo", GtpoTable).beta


def _alpha(config: Config) -> float:
    return config.table("hicra", HicraTable).alpha


def _rho(config: Config) -> float:
    return config.algorithm.surprisal_mask_rho


NONE = TransformSpec(name="none")
GTPO = TransformSpec(
    name="gtpo",
    use_gtpo=True,
    stages={
        "gtpo": CreditStage(apply=gtpo_weights, strength=_beta),
        "top_rho": CreditStage(apply=top_rho_threshold, strength=_rho),
    },
)
GTPO_HICRA = TransformSpec(
    name="gtpo_hicra",
    use_gtpo=True,
    needs_planning=True,
    apply_hicra=True,
    stages={"hicra": CreditStage(apply=amplify_planning, strength=_alpha)},
)
GTPO_SEPA = TransformSpec(
    name="gtpo_sepa", use_gtpo=True, needs_planning=True, uses_sepa_controller=True, entropy_transform=pool_execution
)

GRPO_NONE = AlgorithmSpec(name="grpo_none", advantage_mode="grpo", transform_mode="none")
MAXRL_NONE = AlgorithmSpec(name="maxrl_none", advantage_mode="maxrl", transform_mode="none")
MAXRL_GTPO = AlgorithmSpec(name="maxrl_gtpo", advantage_mode="maxrl", transform_mode="gtpo")
MAXRL_GTPO_HICRA = AlgorithmSpec(name="maxrl_gtpo_hicra", advantage_mode="maxrl", transform_mode="gtpo_hicra")
MAXRL_GTPO_SEPA = AlgorithmSpec(name="maxrl_gtpo_sepa", advantage_mode="maxrl", transform_mode="gtpo_sepa")
