"""Who samples and who trains: engine and backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from retrain.kernel.types import (
    ActionRow,
    Capabilities,
    Floats,
    Sample,
    SampleRequest,
    SamplingParams,
    TrainBatch,
    TrainReport,
)

Deliver = Callable[[int, int, Sample], None]  # (number of the request, number of the seed, the finished sample)


class Engine(Protocol):
    """Draws completions from the current policy. What else it may do stands in `retrain.kernel.contracts.serving`."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One list per request, one sample per seed, in order; a sample depends on its prompt and seed alone.

        An engine that finishes some before others takes a third parameter, `deliver: Deliver | None`, and calls it,
        in the same thread, with each sample as soon as it is finished: it is then scored meanwhile.
        """

    def close(self) -> None:
        """Release what is held; safe to call twice."""


class Backend(Protocol):
    """Owns the policy: samples from it, trains it, saves it. It may be `Measuring` and `SamplesAhead` besides."""

    capabilities: Capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """As `Engine.sample`, from the policy last published; a third parameter `deliver` likewise."""

    def train(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step over at least one row; BackendError, and unchanged weights, on a non-finite number."""

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Optional: log-probabilities that `train` has for the rows' action tokens, 0 elsewhere; nothing changes."""

    def publish(self) -> int:
        """Make the trained policy the one that `sample` uses; returns its version, 0 before any training."""

    def save_adapter(self, folder: Path) -> None:
        """Write a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) into an existing empty folder."""

    def save(self, folder: Path) -> None:
        """Write adapter and optimizer, all that `load` needs, into an existing empty folder."""

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""

    def close(self) -> None:
        """Release device memory and processes; safe to call twice."""
