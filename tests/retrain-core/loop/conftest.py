"""Completions, groups and tasks made by hand for the parts of the loop that need no model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.types import Completion, Example, Group, Score, StopReason

TOYS = Path(__file__).parents[1] / "toys" / "toy_ahead.py"


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


@pytest.fixture
def disturbed(toys: Path, distribution: Callable[..., Path]) -> Any:
    """Where the tests put what is to happen in either half."""
    distribution("retrain-ahead", {"toy_ahead": TOYS.read_text(encoding="utf-8")})
    return importlib.import_module("toy_ahead").Disturbed


@pytest.fixture
def run_ahead(command: Callable[..., Any], disturbed: Any, tokenizer_folder: Path) -> Callable[..., Any]:
    """`run_ahead("--seed", "2")`: a short run that samples while it trains; returns the command's result."""
    base = ["--model", str(tokenizer_folder), "--backend", "toy_ahead", "--data-source", "toy"]
    base += [
        "--reward-type",
        "toy_wordy",
        "--max-steps",
        "5",
        "--batch-size",
        "4",
        "--group-size",
        "8",
        "--max-tokens",
        "3",
    ]
    base += ["--seed", "1", "--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll"]
    base += ["--data-instruction", "", "--temperature", "1.0", "--save-every", "0", "--scoring-audit", "off"]
    return lambda *arguments: command(*base, *arguments)
