"""The rows of an optimizer step, of what a backend has sampled."""

from collections.abc import Sequence

import numpy as np

from retrain.api import Sample, SampleRequest, TrainRow


def sampled_rows(
    requests: Sequence[SampleRequest], groups: Sequence[Sequence[Sample]], rng: np.random.Generator
) -> tuple[TrainRow, ...]:
    """One per completion, each with a random advantage of its own."""
    rows = []
    for request, group in zip(requests, groups, strict=True):
        for sample in group:
            prompt = len(request.prompt_T)
            action_T = np.arange(prompt + len(sample.tokens_T)) >= prompt
            rows.append(
                TrainRow(
                    tokens_T=np.concatenate([request.prompt_T, sample.tokens_T]),
                    action_T=action_T,
                    logprobs_T=np.concatenate([np.zeros(prompt), sample.logprobs_T]),
                    advantages_T=np.where(action_T, rng.normal(), 0.0),
                )
            )
    return tuple(rows)
