"""What a model must do to teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from retrain.kernel.types import ActionRow, Floats


class Teacher(Protocol):
    """A model that gives log-probabilities of given tokens."""

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Those of the rows' action tokens under softmax(logits / temperature), 0 elsewhere.

        `[T]` per row, in nats. BackendError when it cannot give one of them.
        """

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs to get the same numbers, to the bit, as JSON; {} when there is nothing to keep."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned."""

    def close(self) -> None:
        """Release memory and connections; safe to call twice."""
