"""The contract between a backend and the engine that samples for it: what a policy shows, and what an engine may do.

The factory of an engine is `f(context, policy) -> Engine`. A backend that owns the weights calls it once, calls
`publish` of the engine (where it has one) after each change of `policy.version`, and hands `sample` on to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from retrain.kernel.types import ActionRow, Floats, Mask, Tokens


class LogprobRow(NamedTuple):
    """Tokens whose log-probabilities are wanted where `action_T` is True: the least that is an `ActionRow`."""

    tokens_T: Tokens
    action_T: Mask

    @classmethod
    def of(cls, prompt_T: Tokens, tokens_T: Tokens) -> LogprobRow:
        """Prompt and completion, of which the completion is asked about."""
        row_T = np.concatenate([prompt_T, tokens_T])
        return cls(row_T, np.arange(len(row_T)) >= len(prompt_T))


class Policy(Protocol):
    """The policy as last published, as its backend shares it with an engine.

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

        One array of the row's length each, 0 where `action_T` is False. None where the training model does not live in
        this process: an engine then has nothing to be compared with.
        """


@runtime_checkable
class Publishing(Protocol):
    """An engine that keeps a copy of the policy, which has to be brought to each new version."""

    def publish(self) -> None:
        """Make `sample` draw from `policy.version` from now on; BackendError when the copy cannot be shown to be it.

        Called after each change of the policy and before the next `sample`, with no `sample` under way.
        """


@runtime_checkable
class TakesWeights(Protocol):
    """An engine that can also be given all weights of a version, where the trainer writes them itself."""

    def load_weights(self, folder: Path, version: int) -> None:
        """Let every server read these weights, and draw from them as `version` from now on; instead of `publish`."""

    def load_adapter(self, folder: Path, version: int) -> None:
        """Let every server read this PEFT adapter, and draw from it as `version` from now on; instead of `publish`."""


@runtime_checkable
class OverlapsTraining(Protocol):
    """A backend that can sample while it trains: the policy that it samples from is a copy of its own.

    Where `overlaps_training` is True, `train` is called in a thread of its own, and meanwhile the run's thread calls
    `sample` for the step after, which samples from what was last published: the policy before that update; and
    `metrics`, if there is one, for that step's line. Nothing else is called until both have ended. So that a resumed
    run can sample those completions again, `save` writes the policy before the last `publish` too, with its version,
    and after `load` `sample` samples from that one, until `publish`.
    """

    overlaps_training: bool


@runtime_checkable
class SamplesAhead(Protocol):
    """The former name of `OverlapsTraining`, and of its attribute; still understood."""

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
        """Finite numbers about what was done since it was last asked; asked once per step."""
