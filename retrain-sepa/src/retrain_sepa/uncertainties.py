"""Uncertainty kinds: one number >= 0 per action token, from its reported probability or entropy."""

from __future__ import annotations

import numpy as np

from retrain.advantages import UncertaintyContext, UncertaintySpec
from retrain.api import CreditError, Floats, Problem

MAX_SURPRISAL = 50.0  # nats; one impossible token must not flatten the weights of all others
ROUNDING = 1e-3  # nats by which half-precision arithmetic may exceed zero


def surprisal(ctx: UncertaintyContext) -> Floats:
    """-log p of the sampled token, nats in [0, 50], `[T]`; the clamp takes -inf too. CreditError when log p > 0."""
    surprisal_T = -_logprobs(ctx)
    # Rounding can make the log p of a certain token slightly positive.
    np.maximum(surprisal_T, 0.0, out=surprisal_T)
    is_bounded = surprisal_T.max(initial=0.0) <= MAX_SURPRISAL  # the test costs less than half of clamping
    return surprisal_T if is_bounded else np.minimum(surprisal_T, MAX_SURPRISAL, out=surprisal_T)


def predictive_variance(ctx: UncertaintyContext) -> Floats:
    """p (1 - p) of the sampled token, in [0, 0.25], `[T]`; small for very likely and very unlikely tokens alike."""
    logprobs_T = np.minimum(_logprobs(ctx), 0.0)
    return -np.exp(logprobs_T) * np.expm1(logprobs_T)


def shannon_entropy(ctx: UncertaintyContext) -> Floats:
    """Entropy of the sampling distribution at the token, nats >= 0, `[T]`; CreditError without or below zero."""
    if ctx.entropies_T is None:
        what = "shannon_entropy needs entropies, and the sampler gave none"
        fix = 'use an engine that reports them, or uncertainty_kind = "surprisal"'
        raise CreditError(Problem(code="backend.no-entropies", what=what, fix=fix))
    _refuse(ctx.entropies_T < -ROUNDING, ctx.entropies_T, "an entropy is never negative")
    return np.maximum(ctx.entropies_T, 0.0)


def _logprobs(ctx: UncertaintyContext) -> Floats:
    _refuse(ctx.logprobs_T > ROUNDING, ctx.logprobs_T, "a log-probability is never positive")
    return ctx.logprobs_T


def _refuse(bad_T: np.ndarray[tuple[int], np.dtype[np.bool_]], values_T: Floats, rule: str) -> None:
    if bad_T.any():
        position = int(np.argmax(bad_T))
        what = f"{values_T[position]} at token {position}: {rule}"
        fix = "correct the backend or engine that reported it"
        raise CreditError(Problem(code="engine.impossible-number", what=what, fix=fix))


SURPRISAL = UncertaintySpec(name="surprisal", compute=surprisal)
PREDICTIVE_VARIANCE = UncertaintySpec(name="predictive_variance", compute=predictive_variance)
SHANNON_ENTROPY = UncertaintySpec(name="shannon_entropy", compute=shannon_entropy, needs_entropy=True)
