"""A policy without torch, small enough to be known exactly on both sides of a wire: trainer and server in numpy.

The logits after some tokens are base[last] + mean over the context of a[token] @ b. The mean is what stands for keys
and values: a server that caches it per block under an adapter's name goes wrong exactly as a real one does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.kit.inference_server import BLOCK, log_softmax

VOCABULARY, WIDTH = 512, 4
STOP = frozenset({0, 2})
Weights = dict[str, np.ndarray]


def context_means(ids: Sequence[int], weights: Weights) -> np.ndarray:
    """[length, WIDTH]: the mean of a[token] over the tokens up to each."""
    sums = np.cumsum(weights["a"][np.asarray(ids)], axis=0)
    return np.asarray(sums / np.arange(1, len(ids) + 1)[:, None])


@dataclass
class ToyModel:
    """The base both sides share."""

    root: str = "toy"
    vocabulary: int = VOCABULARY
    context_limit: int = 640
    seed: int = 0
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.random.default_rng(self.seed).normal(0.0, 2.0, (self.vocabulary, self.vocabulary))

    def load(self, folder: Path) -> Weights:
        return load_file(folder / "adapter_model.safetensors")

    def logits(self, ids: list[int], weights: Any, cache: dict[Any, Any]) -> Iterator[np.ndarray]:
        weights = weights or zero_weights()
        total, count = np.zeros(WIDTH), 0
        while len(ids) - count > BLOCK:  # whole blocks come from the cache of this adapter's name
            key = tuple(ids[: count + BLOCK])
            if key not in cache:
                cache[key] = total + weights["a"][np.asarray(ids[count : count + BLOCK])].sum(axis=0)
            total, count = cache[key], count + BLOCK
        total = total + weights["a"][np.asarray(ids[count:])].sum(axis=0)
        length, last = len(ids), ids[-1]
        while True:
            last = yield self.table[last] + (total / length) @ weights["b"]
            total, length = total + weights["a"][last], length + 1


def zero_weights() -> Weights:
    return {"a": np.zeros((VOCABULARY, WIDTH)), "b": np.zeros((WIDTH, VOCABULARY))}


@dataclass
class ToyPolicy:
    """A `retrain.api.Policy`. `train(seed)` makes the next version; `is_remote` has no training model in process."""

    model: ToyModel = field(default_factory=ToyModel)
    weights: Weights = field(default_factory=zero_weights)
    model_path: str = "toy"
    stop_ids: frozenset[int] = STOP
    context_limit: int | None = 640
    version: int = 0
    is_remote: bool = False

    def __post_init__(self) -> None:
        if not self.weights["a"].any():
            self.weights["a"] = np.random.default_rng(1).normal(0.0, 1.0, self.weights["a"].shape)

    def train(self, size: float = 1.0) -> None:
        """The next version: all of its numbers are new."""
        self.version += 1
        stream = np.random.default_rng(100 + self.version)
        self.weights = {name: size * stream.normal(0.0, 1.0, value.shape) for name, value in self.weights.items()}

    def save_adapter(self, folder: Path) -> None:
        save_file(
            {name: np.ascontiguousarray(v) for name, v in self.weights.items()}, folder / "adapter_model.safetensors"
        )
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": WIDTH}), encoding="utf-8")

    def logprobs(self, rows: Sequence[Any], temperature: float) -> list[np.ndarray] | None:
        if self.is_remote:
            return None
        return [self._of_row(np.asarray(tokens_T), np.asarray(action_T), temperature) for tokens_T, action_T in rows]

    def gap(self, requests: Sequence[Any], groups: Sequence[Sequence[Any]], temperature: float = 0.7) -> float:
        """Return the largest distance of samples from this policy, in nats."""
        pairs = [(r.prompt_T, sample) for r, group in zip(requests, groups, strict=True) for sample in group]
        rows = [(np.concatenate([prompt_T, s.tokens_T]), len(prompt_T), s.logprobs_T) for prompt_T, s in pairs]
        own = [self._of_row(ids_T, np.arange(len(ids_T)) >= start, temperature)[start:] for ids_T, start, _ in rows]
        return max(float(np.abs(own_T - told_T).max()) for own_T, (_, _, told_T) in zip(own, rows, strict=True))

    def _of_row(self, tokens_T: np.ndarray, action_T: np.ndarray, temperature: float) -> np.ndarray:
        found_T = np.zeros(len(tokens_T))
        means = context_means(tokens_T.tolist(), self.weights)
        for place in np.flatnonzero(action_T):
            logits = self.model.table[tokens_T[place - 1]] + means[place - 1] @ self.weights["b"]
            found_T[place] = log_softmax(logits / temperature)[tokens_T[place]]
        return found_T
