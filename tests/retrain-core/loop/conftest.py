"""Completions, groups and tasks made by hand for the parts of the loop that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from retrain.types import Completion, Example, Group, Score, StopReason


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    """`make_completion(logprobs, prompt=2)`: two prompt tokens, then one sampled token per log-probability."""

    def make(logprobs: Sequence[float] = (-1.0,), *, prompt: int = 2, **more: Any) -> Completion:
        length = prompt + len(logprobs)
        entropies = more.pop("entropies", None)
        return Completion(
            tokens_T=np.arange(length),
            action_T=np.arange(length) >= prompt,
            logprobs_T=np.concatenate([np.zeros(prompt), np.asarray(logprobs, dtype=np.float64)]),
            entropies_T=None if entropies is None else np.concatenate([np.zeros(prompt), entropies]),
            **({"text": "", "stop_reason": StopReason.EOS, "policy_version": 0} | more),
        )

    return make


@pytest.fixture
def make_group(make_completion: Callable[..., Completion]) -> Callable[..., Group]:
    """`make_group(1, 0, None, "failed")`: a number is a score, None no verdict, text a failure."""

    def score(value: float | str | None) -> Score:
        if isinstance(value, str):
            return Score.failed(value)
        return Score.no_verdict("cannot tell") if value is None else Score.of(value)

    def make(*values: float | str | None, reference: str = "7", completions: Sequence[Completion] = ()) -> Group:
        return Group(
            example=Example(id="e", prompt="p", reference=reference),
            completions=tuple(completions) or tuple(make_completion() for _ in values),
            scores=tuple(score(value) for value in values),
        )

    return make
