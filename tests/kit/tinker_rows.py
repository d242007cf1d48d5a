"""Samples of a toy Tinker service and the rows that are made of them."""

from typing import Any

import numpy as np

from retrain.api import SampleRequest, SamplingParams, TrainBatch, TrainRow

EOS = 0
PROMPT = np.array([3, 4, 5])


def drawn(backend: Any, count: int = 4, prompts: int = 2, max_tokens: int = 6, first_seed: int = 0) -> Any:
    """Samples of a few prompts."""
    requests = [
        SampleRequest(prompt_T=PROMPT + p, seeds_G=tuple(first_seed + 100 * p + i for i in range(count)))
        for p in range(prompts)
    ]
    return requests, backend.sample(requests, SamplingParams(max_tokens=max_tokens, temperature=1.0))


def batch_of(requests: Any, samples: Any, step: int = 0) -> TrainBatch:
    """Rows of samples with advantages that differ from row to row and from token to token."""
    rows = []
    for request, group in zip(requests, samples, strict=True):
        for number, sample in enumerate(group):
            ahead, length = len(request.prompt_T), len(request.prompt_T) + len(sample.tokens_T)
            advantages = np.zeros(length)
            advantages[ahead:] = (number - 1.3) * (1.0 + 0.1 * np.arange(length - ahead))
            rows.append(
                TrainRow(
                    tokens_T=np.concatenate([request.prompt_T, sample.tokens_T]),
                    action_T=np.arange(length) >= ahead,
                    logprobs_T=np.concatenate([np.zeros(ahead), sample.logprobs_T]),
                    advantages_T=advantages,
                )
            )
    return TrainBatch(step=step, rows=tuple(rows), temperature=1.0)
