"""The stages of credit that any transform may switch on: GTPO weight, HICRA amplification, top-rho mask.

`_T` = action tokens of one completion. Everything is float64 and free of per-token Python loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.api import CreditError, Floats, Mask, Problem

MAX_UNCERTAINTY = 50.0  # one impossible token must not flatten the weights of all others
FLAT_UNCERTAINTY = 1e-7  # a mean below this gives no basis for weights


def gtpo_weights(uncertainty_T: Floats, beta: float) -> Floats:
    """Entropy-weighted credit within one completion: w_t = max(0, 1 + beta (U_t / mean U - 1)).

    U is clamped to 50. Uniform when beta = 0 or mean U < 1e-7. For 0 <= beta <= 1 the mean of w is exactly 1, so the
    completion's advantage is redistributed, never scaled; beta > 1 can clamp at 0 and breaks that.
    After GTPO (arXiv:2508.04349), from which it differs: sampled-token uncertainty rather than entropy, no separate
    rule for wrong answers, multiplicative, normalised over the completion rather than across answers.
    """
    bounded_T = np.asarray(uncertainty_T)
    if not bounded_T.max(initial=0.0) <= MAX_UNCERTAINTY:  # the test costs less than half of clamping
        bounded_T = np.minimum(bounded_T, MAX_UNCERTAINTY)
    mean = bounded_T.mean() if bounded_T.size else 0.0
    if beta == 0.0 or mean < FLAT_UNCERTAINTY:
        return np.ones(bounded_T.shape)
    weights_T = bounded_T * (beta / mean)
    weights_T += 1.0 - beta
    return weights_T if 0.0 <= beta <= 1.0 else np.maximum(weights_T, 0.0, out=weights_T)  # w >= 1 - beta


def amplify_planning(advantages_T: Floats, planning_T: Mask, alpha: float) -> Floats:
    """HICRA: A + alpha |A| on planning tokens, unchanged elsewhere (arXiv:2509.03646).

    alpha in [0, 1]. Planning tokens of wrong answers are penalised *less* (alpha = 1 removes the penalty). Unlike in
    the paper, it comes after the GTPO weight.
    """
    if np.shape(planning_T) != np.shape(advantages_T):
        what = f"planning mask has shape {np.shape(planning_T)}, expected {np.shape(advantages_T)}"
        raise CreditError(Problem(what=what, fix="give one entry per token"))
    return np.where(planning_T, advantages_T + alpha * np.abs(advantages_T), advantages_T)


def top_rho_threshold(uncertainties: Sequence[Floats], rho: float) -> float:
    """Smallest uncertainty that keeps its credit: the value at rank max(1, floor(n rho)), over all given tokens.

    Ties are kept, so slightly more than rho may survive. -inf (keep all) when rho is 0 (off), 1, or nothing is given.
    After arXiv:2506.01939 ("80/20"), which uses the entropy; masked tokens stay in the loss denominator, as there.
    """
    count = sum(values.size for values in uncertainties)
    if rho <= 0.0 or rho >= 1.0 or count == 0:
        return float("-inf")
    rank = max(1, int(np.floor(count * rho + 1e-9)))
    flat = np.concatenate(list(uncertainties))
    return float(np.partition(flat, count - rank)[count - rank])
