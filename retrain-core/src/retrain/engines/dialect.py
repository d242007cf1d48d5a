"""What differs from one kind of server to the next: paths, and the fields of requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.engines.answers import CompletionRequest, RawCompletion
from retrain.engines.client import BadAnswerError
from retrain.kernel.errors import ConfigError, Problem

FULL_DISTRIBUTION: Mapping[str, Any] = {  # vLLM and SGLang: overrides the generation defaults that come with a model
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
}
HttpRequest = tuple[str, Mapping[str, Any] | None]  # path and JSON body; a body of None is a GET


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its server names it; `root` is where it was loaded from, None where the server does not say."""

    name: str
    root: str | None = None
    context_limit: int | None = None


class Dialect(Protocol):
    """One kind of server. Everything else, from retries to the check of each answer, is common to all.

    `start_hint` is the option that makes the server return log-probabilities after temperature, `adapter_hint` what it
    must be started with to accept adapters.
    """

    name: str
    default_url: str
    start_hint: str
    adapter_hint: str

    def models(self) -> HttpRequest:
        """The request for the list of served models."""

    def parse_models(self, answer: Any) -> list[ServedModel]:
        """The base models without adapters; BadAnswerError when the answer cannot be read."""

    def completion(self, request: CompletionRequest) -> HttpRequest:
        """The request for one completion from the full distribution, with the model's own defaults overridden."""

    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        """The answer to `completion`, unchecked; BadAnswerError when it cannot be read."""

    def load_adapter(self, name: str, folder: Path) -> HttpRequest:
        """The request that loads a PEFT adapter under a name."""

    def unload_adapter(self, name: str) -> HttpRequest:
        """The request that unloads an adapter."""

    def load_weights(self, folder: Path) -> list[HttpRequest]:
        """The requests that replace all weights, in order; ConfigError where the server cannot."""


class CommonRoutes:
    """The routes that most servers share; `adapter_routes` is the path before `/load_lora_adapter`."""

    product = "this kind of"
    adapter_routes = ""

    def models(self) -> HttpRequest:
        """See `Dialect.models`."""
        return "/v1/models", None

    def parse_models(self, answer: Any) -> list[ServedModel]:
        """See `Dialect.parse_models`; in OpenAI's form, where an adapter is an entry with a parent."""
        try:
            return [
                ServedModel(name=str(entry["id"]), root=entry.get("root"), context_limit=entry.get("max_model_len"))
                for entry in answer["data"]
                if not entry.get("parent")
            ]
        except (KeyError, TypeError, AttributeError):
            raise BadAnswerError("the list of models cannot be read") from None

    def load_adapter(self, name: str, folder: Path) -> HttpRequest:
        """See `Dialect.load_adapter`; never `load_inplace`, which changes weights in the middle of a completion."""
        return f"{self.adapter_routes}/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}

    def unload_adapter(self, name: str) -> HttpRequest:
        """See `Dialect.unload_adapter`."""
        return f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": name}

    def load_weights(self, folder: Path) -> list[HttpRequest]:
        """See `Dialect.load_weights`."""
        what, fix = f"{self.product} server cannot take full weights", 'use engine = "vllm", or train an adapter'
        raise ConfigError(Problem(where="[inference] engine", what=what, fix=fix))
