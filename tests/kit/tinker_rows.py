"""Samples of a toy Tinker service and the rows that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from retrain.api import SampleRequest, SamplingParams, TrainBatch
from tests.kit.sampled_rows import sampled_rows

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
    numbers = [number for group in samples for number in range(len(group))]
    rows = []
    for number, row in zip(numbers, sampled_rows(requests, samples, np.random.default_rng(0)), strict=True):
        place_T = np.maximum(np.cumsum(row.action_T) - 1, 0)
        rows.append(replace(row, advantages_T=row.action_T * (number - 1.3) * (1.0 + 0.1 * place_T)))
    return TrainBatch(step=step, rows=tuple(rows), temperature=1.0)


def policy_gradient(table: np.ndarray, batch: TrainBatch) -> np.ndarray:
    """Return the gradient of the mean of -A log p over the action tokens in the logits whose log-softmax is `table`."""
    gradient = np.zeros_like(table)
    for row in batch.rows:
        for at in np.flatnonzero(row.action_T):
            read, token, weight = row.tokens_T[at - 1], row.tokens_T[at], row.advantages_T[at] / batch.num_actions
            gradient[read] += weight * np.exp(table[read])
            gradient[read, token] -= weight
    return gradient
