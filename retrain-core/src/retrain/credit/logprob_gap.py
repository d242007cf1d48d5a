"""Measures how far the sampler's log-probabilities are from the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.kernel.types import Floats, LogprobRow, Sample, SampleRequest, SamplingParams, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """|log p_trainer - log p_sampler| over `num_tokens` sampled tokens, in nats; NaN when one of them is not finite."""

    mean: float
    p99: float
    max: float
    num_tokens: int

    @classmethod
    def of(cls, differences: Sequence[Floats]) -> LogprobGap:
        """The gap over all entries of log p_trainer - log p_sampler, at least one."""
        sizes_N = np.abs(np.concatenate(differences))
        if not np.isfinite(sizes_N).all():
            return cls(mean=np.nan, p99=np.nan, max=np.nan, num_tokens=len(sizes_N))
        return cls(
            mean=float(sizes_N.mean()),
            p99=float(np.percentile(sizes_N, 99)),
            max=float(sizes_N.max()),
            num_tokens=len(sizes_N),
        )


def measure_gap(
    backend: Any,
    prompts: Sequence[Tokens],
    params: SamplingParams,
    *,
    seeds: Sequence[int] | None = None,
    reported: Callable[[Sample], Floats],
) -> LogprobGap | None:
    """Sample one completion per prompt from `backend` and compare `reported` with its trainer's log-probabilities.

    None when the backend has no `logprobs`, or its trainer is not in this process.
    """
    if not hasattr(backend, "logprobs"):
        return None
    chosen = range(len(prompts)) if seeds is None else seeds
    requests = [SampleRequest(prompt_T=p_T, seeds_G=(seed,)) for p_T, seed in zip(prompts, chosen, strict=True)]
    samples: list[Sample] = [samples_G[0] for samples_G in backend.sample(requests, params)]
    rows = [LogprobRow.of(prompt_T, sample.tokens_T) for prompt_T, sample in zip(prompts, samples, strict=True)]
    trained = backend.logprobs(rows, params.temperature)
    if trained is None:
        return None
    pairs = zip(trained, rows, samples, strict=True)
    return LogprobGap.of([all_T[row.action_T] - reported(sample) for all_T, row, sample in pairs])
