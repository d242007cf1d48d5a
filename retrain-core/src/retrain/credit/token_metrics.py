"""Fields of a step's line about the uncertainty of its tokens; `_A` one entry per action token of the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from retrain.kernel.types import Completion, Floats, Mask


def token_metrics(
    completions: Sequence[Completion], planning_A: Mask, pooled_A: Floats, *, uncertainty: str
) -> dict[str, float]:
    """Mean and variance of uncertainty over execution and planning tokens, before and after pooling.

    `surprisal` is -log p of the sampled tokens, `entropy` that of the sampling distribution; `post_*` is the configured
    uncertainty after pooling. A field is absent when there is no such token.
    """
    logprobs_A = concatenated((c.logprobs_T[c.action_T] for c in completions), np.float64)
    fields = _split("surprisal", -logprobs_A, planning_A)
    entropies = [c.entropies_T[c.action_T] for c in completions if c.entropies_T is not None]
    if len(entropies) == len(completions):
        fields |= _split("entropy", concatenated(entropies, np.float64), planning_A)
    kind = "surprisal" if uncertainty == "surprisal" else "uncertainty"
    return fields | {f"post_{name}": value for name, value in _split(kind, pooled_A, planning_A).items()}


def execution_variance(uncertainty_A: Floats, planning_A: Mask) -> float | None:
    """Variance of the configured uncertainty over the step's execution tokens, before pooling; None without any."""
    values = uncertainty_A[~planning_A]
    return float(values.var()) if values.size else None


def concatenated(arrays: Iterable[np.ndarray[Any, Any]], dtype: type) -> np.ndarray[Any, Any]:
    """All arrays as one, of length 0 when there is none."""
    given = list(arrays)
    return np.concatenate(given).astype(dtype, copy=False) if given else np.zeros(0, dtype)


def _split(name: str, values_A: Floats, planning_A: Mask) -> dict[str, float]:
    fields: dict[str, float] = {}
    for part, chosen in (("exec", values_A[~planning_A]), ("plan", values_A[planning_A])):
        if chosen.size:
            fields |= {f"{part}_{name}_mean": float(chosen.mean()), f"{part}_{name}_var": float(chosen.var())}
    return fields
