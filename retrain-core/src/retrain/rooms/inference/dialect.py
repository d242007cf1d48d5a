"""What differs from one kind of server to the next: paths, and the words in requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.rooms.inference.answers import Asked, Said
from retrain.rooms.inference.client import BadAnswerError

Request = tuple[str, Mapping[str, Any] | None]  # path and body; a body of None is a GET


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as its server names it; `root` is where it was loaded from, None where that is not told."""

    name: str
    root: str | None = None
    context_limit: int | None = None


class Dialect(Protocol):
    """One kind of server. Everything else, from retries to the check of each answer, is the same for all.

    `start_hint` is the option (or words) that makes the server give log-probabilities after temperature.
    `adapter_hint` is what it must be started with to take adapters.
    """

    name: str
    default_url: str
    start_hint: str
    adapter_hint: str

    def models(self) -> Request:
        """Ask what is served."""

    def served(self, answer: Any) -> list[Served]:
        """The base models, adapters left out; BadAnswerError when it cannot be read."""

    def completion(self, asked: Asked) -> Request:
        """Ask for one completion, from the full distribution: whatever the model's defaults are, none applies."""

    def said(self, answer: Any, asked: Asked) -> Said:
        """What the answer to `completion` says; BadAnswerError when it cannot be read."""

    def load_adapter(self, name: str, folder: Path) -> Request:
        """Load a PEFT adapter under a name."""

    def unload_adapter(self, name: str) -> Request:
        """Forget an adapter."""

    def load_weights(self, folder: Path) -> list[Request]:
        """Replace all weights, one request after the other; ConfigError where the server cannot."""


def listed_models(answer: Any) -> list[Served]:
    """The base models in an OpenAI-like list: an adapter is an entry with a parent. BadAnswerError when it is none."""
    try:
        return [
            Served(name=str(entry["id"]), root=entry.get("root"), context_limit=entry.get("max_model_len"))
            for entry in answer["data"]
            if not entry.get("parent")
        ]
    except (KeyError, TypeError, AttributeError):
        raise BadAnswerError("the list of models cannot be read") from None
