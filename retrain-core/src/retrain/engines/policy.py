"""The contract between a backend and the engine that samples for it: the policy, and whole weights.

The factory of an engine is `f(context, policy) -> Engine`. A backend that owns the weights calls it once, calls the
engine's `publish` (if it has one) after each change of `policy.version`, and forwards `sample` to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from retrain.kernel.types import ActionRow, Floats


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
class TakesWeights(Protocol):
    """An engine that can also load a version's complete weights, when the trainer writes them itself."""

    def load_weights(self, folder: Path, version: int) -> None:
        """Make every server load these weights and sample from them as `version` from now on, instead of `publish`."""

    def load_adapter(self, folder: Path, version: int) -> None:
        """Make every server load this PEFT adapter and sample with it as `version` from now on; not `publish`."""
