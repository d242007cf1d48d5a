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
            experts = sample.experts_TLK
            rows.append(
                TrainRow(
                    tokens_T=np.concatenate([request.prompt_T, sample.tokens_T]),
                    action_T=action_T,
                    logprobs_T=np.concatenate([np.zeros(prompt), sample.logprobs_T]),
                    advantages_T=np.where(action_T, rng.normal(), 0.0),
                    experts_TLK=None if experts is None else after_prompt(prompt, experts),
                )
            )
    return tuple(rows)


def after_prompt(prompt: int, experts_TLK: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full((prompt, *experts_TLK.shape[1:]), -1, np.int16), experts_TLK])


def make_row(length: int, *, prompt: int | None = None, seed: int = 0, varying: bool = True) -> TrainRow:
    """A row whose tokens tell where they come from: 1000 x seed + position."""
    stream = np.random.default_rng(seed)
    start = max(1, length // 2) if prompt is None else prompt
    action_T = np.arange(length) >= min(start, length - 1)
    advantages_T = stream.normal(size=length) if varying else np.full(length, 0.5)
    return TrainRow(
        tokens_T=np.arange(length, dtype=np.int64) + 1000 * seed,
        action_T=action_T,
        logprobs_T=np.where(action_T, -stream.exponential(size=length), 0.0),
        advantages_T=np.where(action_T, advantages_T, 0.0),
    )
