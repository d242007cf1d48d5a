"""Token transforms: SEPA pooling, GTPO weight, HICRA amplification, top-rho mask, and the paper's five conditions.

`_T` = action tokens of one completion. Everything is float64 and free of per-token Python loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.advantages import AlgorithmSpec, CreditStage, TransformSpec
from retrain.api import CreditError, Floats, Mask, Problem
from retrain_sepa.tables import GtpoTable, HicraTable

# One impossible token must not flatten the weights of all others.
MAX_UNCERTAINTY = 50.0
# A mean below this gives no basis for weights.
FLAT_UNCERTAINTY = 1e-7


def pool_execution(uncertainty_T: Floats, planning_T: Mask, sepa_lambda: float) -> Floats:
    """SEPA: pull the uncertainty of execution tokens towards their mean, within one completion.

    U'_t = lambda mean(U over execution tokens) + (1 - lambda) U_t where `planning_T` is False; planning tokens keep
    U_t. lambda is clamped to [0, 1]. Both means are preserved, so the GTPO weights of planning tokens do not depend
    on lambda; the variance over execution tokens is multiplied by (1 - lambda)^2. Returns a new array `[T]`, equal to
    the input when lambda = 0 or there is no execution token. CreditError for unequal lengths or a lambda that is NaN.
    Selective Entropy Pooling with Annealing (Millet); attention plays no part in it.
    """
    if uncertainty_T.shape != planning_T.shape:
        lengths = f"{len(planning_T)} entries for {len(uncertainty_T)} tokens"
        fix = "give one entry per token"
        raise CreditError(Problem(code="credit.wrong-mask", what=f"planning mask has {lengths}", fix=fix))
    if np.isnan(sepa_lambda):
        raise CreditError(Problem(code="credit.bad-lambda", what="lambda is not a number", fix="give one in [0, 1]"))
    strength = min(max(sepa_lambda, 0.0), 1.0)
    # Products and sums are several times faster than boolean indexing.
    weights_T = 1.0 - planning_T
    count = weights_T.sum()
    if strength == 0.0 or count == 0.0:
        return np.array(uncertainty_T, dtype=np.float64)
    weights_T *= uncertainty_T
    pooled_T = uncertainty_T * (1.0 - strength)
    pooled_T += strength * weights_T.sum() / count
    np.copyto(pooled_T, uncertainty_T, where=planning_T)
    return pooled_T


def gtpo_weights(uncertainty_T: Floats, beta: float) -> Floats:
    """Entropy-weighted credit within one completion: w_t = max(0, 1 + beta (U_t / mean U - 1)).

    U is clamped to 50. Uniform when beta = 0 or mean U < 1e-7. For 0 <= beta <= 1 the mean of w is exactly 1, so the
    completion's advantage is redistributed, never scaled; beta > 1 can clamp at 0 and breaks that.
    After GTPO (arXiv:2508.04349), from which it differs: sampled-token uncertainty rather than entropy, no separate
    rule for wrong answers, multiplicative, normalised over the completion rather than across answers.
    """
    bounded_T = np.asarray(uncertainty_T)
    # The test costs less than half of clamping.
    if not bounded_T.max(initial=0.0) <= MAX_UNCERTAINTY:
        bounded_T = np.minimum(bounded_T, MAX_UNCERTAINTY)
    mean = bounded_T.mean() if bounded_T.size else 0.0
    if beta == 0.0 or mean < FLAT_UNCERTAINTY:
        return np.ones(bounded_T.shape)
    weights_T = bounded_T * (beta / mean)
    weights_T += 1.0 - beta
    return weights_T if 0.0 <= beta <= 1.0 else np.maximum(weights_T, 0.0, out=weights_T)  # w >= 1 - beta


def amplify_planning(advantages_T: Floats, planning_T: Mask, alpha: float) -> Floats:
    """HICRA: A + alpha |A| on planning tokens, A on others (arXiv:2509.03646).

    alpha in [0, 1]. Planning tokens of wrong answers are penalised *less* (alpha = 1 removes the penalty). Unlike in
    the paper, it comes after the GTPO weight.
    """
    if np.shape(planning_T) != np.shape(advantages_T):
        what = f"planning mask has shape {np.shape(planning_T)}, expected {np.shape(advantages_T)}"
        raise CreditError(Problem(code="credit.wrong-mask", what=what, fix="give one entry per token"))
    return np.where(planning_T, advantages_T + alpha * np.abs(advantages_T), advantages_T)


def top_rho_threshold(uncertainties: Sequence[Floats], rho: float) -> float:
    """Return the smallest uncertainty that keeps its credit: the value at rank max(1, floor(n rho)) of all tokens.

    Ties are kept, so slightly more than rho may survive. -inf (keep all) when rho is 0 (off), 1, or nothing is given.
    After arXiv:2506.01939 ("80/20"), but that uses the entropy; masked tokens stay in the loss denominator, as there.
    """
    count = sum(values.size for values in uncertainties)
    if rho <= 0.0 or rho >= 1.0 or count == 0:
        return float("-inf")
    rank = max(1, int(np.floor(count * rho + 1e-9)))
    flat = np.concatenate(list(uncertainties))
    return float(np.partition(flat, count - rank)[count - rank])


NONE = TransformSpec(name="none")
GTPO = TransformSpec(
    name="gtpo",
    use_gtpo=True,
    stages={
        "gtpo": CreditStage(apply=gtpo_weights, strength=lambda config: config.table("gtpo", GtpoTable).beta),
        "top_rho": CreditStage(apply=top_rho_threshold, strength=lambda config: config.algorithm.surprisal_mask_rho),
    },
)
GTPO_HICRA = TransformSpec(
    name="gtpo_hicra",
    use_gtpo=True,
    needs_planning=True,
    apply_hicra=True,
    stages={
        "hicra": CreditStage(apply=amplify_planning, strength=lambda config: config.table("hicra", HicraTable).alpha)
    },
)
GTPO_SEPA = TransformSpec(
    name="gtpo_sepa", use_gtpo=True, needs_planning=True, uses_sepa_controller=True, entropy_transform=pool_execution
)

GRPO_NONE = AlgorithmSpec(name="grpo_none", advantage_mode="grpo", transform_mode="none")
MAXRL_NONE = AlgorithmSpec(name="maxrl_none", advantage_mode="maxrl", transform_mode="none")
MAXRL_GTPO = AlgorithmSpec(name="maxrl_gtpo", advantage_mode="maxrl", transform_mode="gtpo")
MAXRL_GTPO_HICRA = AlgorithmSpec(name="maxrl_gtpo_hicra", advantage_mode="maxrl", transform_mode="gtpo_hicra")
MAXRL_GTPO_SEPA = AlgorithmSpec(name="maxrl_gtpo_sepa", advantage_mode="maxrl", transform_mode="gtpo_sepa")
