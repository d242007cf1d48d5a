"""The contract between a backend and the engine that samples for it: what a policy exposes, what an engine may do.

The factory of an engine is `f(context, policy) -> Engine`. A backend that owns the weights calls it once, calls the
engine's `publish` (if it has one) after each change of `policy.version`, and forwards `sample` to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from retrain.kernel.types import ActionRow, Floats, Mask, Tokens


class LogprobRow(NamedTuple):
    """Tokens whose log-probabilities are requested where `action_T` is True: the minimal `ActionRow`."""

    tokens_T: Tokens
    action_T: Mask

    @classmethod
    def of(cls, prompt_T: Tokens, tokens_T: Tokens) -> LogprobRow:
        """Prompt and completion; the completion's log-probabilities are requested."""
        row_T = np.concatenate([prompt_T, tokens_T])
        return cls(row_T, np.arange(len(row_T)) >= len(prompt_T))


class Policy(Protocol):
    """The last published policy, as its backend shares it with an engine.

    `model_path` is the base model as a server must know it, a folder or hub id. `stop_ids` end a completion.
    `context_limit` is the longest row of tokens, None when unknown. `version` counts the optimizer steps in the
    published weights; 0 is the untrained policy.
    """

    model_path: str
    stop_ids: frozenset[int]
    context_limit: int | None
    version: int

    def save_adapter(self, folder: Path) -> None:
        """Write the published policy as a PEFT adapter into an existing empty folder."""

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats] | None:
        """The published policy's own log-probabilities under softmax(logits / temperature), in nats.

        One array of the row's length each, 0 where `action_T` is False. None if the training model does not live in
        this process: then there is nothing to compare an engine with.
        """


@runtime_checkable
class Publishing(Protocol):
    """An engine with its own copy of the policy, which must be updated to each new version."""

    def publish(self) -> None:
        """Make `sample` use `policy.version` from now on; BackendError when the copy cannot be verified to be it.

        Called after each change of the policy and before the next `sample`, with no `sample` under way.
        """


@runtime_checkable
class TakesWeights(Protocol):
    """An engine that can also load a version's complete weights, when the trainer writes them itself."""

    def load_weights(self, folder: Path, version: int) -> None:
        """Make every server load these weights and sample from them as `version` from now on, instead of `publish`."""

    def load_adapter(self, folder: Path, version: int) -> None:
        """Make every server load this PEFT adapter and sample with it as `version` from now on; not `publish`."""


@runtime_checkable
class OverlapsTraining(Protocol):
    """A backend that can sample while it trains, because it samples from a separate copy of the policy.

    If `overlaps_training` is True, `train` runs in a thread of its own. Meanwhile the run's thread calls `sample` for
    the next step, which uses the last published policy, the one before that update; and `metrics`, if it exists, for
    that step's line. Nothing else is called until both have ended. So that a resumed run can resample those
    completions, `save` also writes the policy before the last `publish`, with its version; after `load`, `sample` uses
    that one until `publish`.
    """

    overlaps_training: bool


@runtime_checkable
class SamplesAhead(Protocol):
    """The former name of `OverlapsTraining` and of its attribute; still supported."""

    samples_ahead: bool


def overlaps_training(backend: object) -> bool:
    """Whether a backend samples while it trains, in this run."""
    if isinstance(backend, OverlapsTraining):
        return backend.overlaps_training
    return isinstance(backend, SamplesAhead) and backend.samples_ahead


@runtime_checkable
class Measuring(Protocol):
    """A backend or engine with fields of its own for the step's line in `metrics.jsonl`."""

    def metrics(self) -> Mapping[str, float]:
        """Finite numbers about the work since the previous call; called once per step."""
