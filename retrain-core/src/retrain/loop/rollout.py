"""Samples a group of completions for each prompt and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.errors import BackendError, NonFiniteError, Problem
from retrain.loop.prompts import Prompt
from retrain.seeding import Seeds
from retrain.types import Completion, Sample, SampleRequest, SamplingParams

if TYPE_CHECKING:
    from retrain.plugins.protocols import Backend


def sample_groups(
    backend: Backend,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    params: SamplingParams,
    seeds: Seeds,
    purpose: str,
    tokenizer: Any,
) -> list[tuple[Completion, ...]]:
    """`group_size` completions of every prompt, each from a stream of its own.

    The stream is keyed by (purpose, example, epoch, number in the group): neither the step nor the batch size is in it.
    """
    requests = [
        SampleRequest(
            prompt_T=prompt.tokens_T,
            seeds_G=tuple(seeds.derive(purpose, prompt.example.id, prompt.epoch, i) for i in range(group_size)),
        )
        for prompt in prompts
    ]
    samples = backend.sample(requests, params)
    _check_counts(samples, len(prompts), group_size)
    flat = [sample for group in samples for sample in group]
    texts = iter(tokenizer.batch_decode([sample.tokens_T for sample in flat], skip_special_tokens=True))
    return [
        tuple(_completion(prompt, sample, next(texts)) for sample in group)
        for prompt, group in zip(prompts, samples, strict=True)
    ]


def _completion(prompt: Prompt, sample: Sample, text: str) -> Completion:
    """Prompt and sampled tokens as one row. BackendError on a sample that could not have been drawn."""
    for name, values in (("log-probability", sample.logprobs_T), ("entropy", sample.entropies_T)):
        if values is not None and (len(values) != len(sample.tokens_T) or not np.isfinite(values).all()):
            what = (
                f"sampler returned a {name} that is not finite, or not one per token, for example {prompt.example.id}"
            )
            raise NonFiniteError(Problem(where="sampling", what=what, fix="check the model's weights and dtype"))
    ahead, drawn = len(prompt.tokens_T), len(sample.tokens_T)
    return Completion(
        tokens_T=np.concatenate([prompt.tokens_T, sample.tokens_T]),
        action_T=np.concatenate([np.zeros(ahead, np.bool_), np.ones(drawn, np.bool_)]),
        logprobs_T=np.concatenate([np.zeros(ahead), sample.logprobs_T]),
        entropies_T=None if sample.entropies_T is None else np.concatenate([np.zeros(ahead), sample.entropies_T]),
        text=text,
        stop_reason=sample.stop_reason,
        policy_version=sample.policy_version,
    )


def _check_counts(samples: Sequence[Sequence[Sample]], prompts: int, group_size: int) -> None:
    if len(samples) != prompts or any(len(group) != group_size for group in samples):
        counts = [len(group) for group in samples]
        what = f"asked for {prompts} x {group_size} completions, got groups of {counts}"
        raise BackendError(Problem(where="sampling", what=what, fix="the backend must return one sample per seed"))
