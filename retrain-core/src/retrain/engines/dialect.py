"""The differences between kinds of servers: paths, and the fields of requests and answers."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.engines.client import BadAnswerError, Call, Client, OtherModelError
from retrain.engines.policy import Policy
from retrain.engines.pool import Server
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Experts, Floats, StopReason, Tokens

# vLLM and SGLang otherwise apply the generation defaults that come with a model.
FULL_DISTRIBUTION: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
}
HttpRequest = tuple[str, Mapping[str, Any] | None]  # path and JSON body; a body of None is a GET
ROUNDING = 1e-3  # nats by which rounding may lift a log-probability above 0
LENGTH_REASONS = frozenset({"length", "max_tokens"})
STOP_REASONS = frozenset({"stop", "eos", "stop_token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenToken:
    """A server's unchecked entry for a given token; `text` None where it names no text."""

    logprob: Any
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its server names it; `root` is where it was loaded from, None where unknown."""

    name: str
    root: str | None = None
    context_limit: int | None = None


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """As a decorator: an answer of another form than the function reads is a BadAnswerError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise BadAnswerError(what) from None


class Dialect:
    """One kind of server, with the routes that most of them share. All else, from retries to checks, is common to all.

    `product` names it with an article. `adapter_routes` is the path before `/load_lora_adapter`. `start_hint` is the
    option for log-probabilities after temperature, `adapter_hint` the option for adapters.
    """

    name: str
    start_hint: str
    adapter_hint: str
    product = "this kind of"
    adapter_routes = ""

    def models(self) -> HttpRequest:
        return "/v1/models", None

    @refusing("the list of models cannot be read")
    def parse_models(self, answer: Any) -> list[ServedModel]:
        """The base models without adapters (entries with a parent); BadAnswerError when the answer cannot be read."""
        return [
            ServedModel(name=str(entry["id"]), root=entry.get("root"), context_limit=entry.get("max_model_len"))
            for entry in answer["data"]
            if not entry.get("parent")
        ]

    def completion(self, request: CompletionRequest) -> HttpRequest:
        """The request for one completion from the full distribution, with the model's own defaults overridden."""
        raise NotImplementedError

    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        """The answer to `completion`, unchecked; BadAnswerError when it cannot be read."""
        raise NotImplementedError

    def load_adapter(self, name: str, folder: Path) -> HttpRequest:
        """The request that loads a PEFT adapter under a new name.

        Never with `load_inplace`: it changes weights in the middle of a completion.
        """
        return f"{self.adapter_routes}/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}

    def unload_adapter(self, name: str) -> HttpRequest:
        return f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": name}

    def load_weights(self, folder: Path) -> list[HttpRequest]:
        """The requests that replace all weights, in order; ConfigError where the server cannot."""
        what, fix = f"{self.product} server cannot load full weights", 'use engine = "vllm", or train an adapter'
        raise ConfigError(Problem(code="engine.no-full-weights", where="[inference] engine", what=what, fix=fix))

    def given_tokens(self, tokens: list[int], model: str) -> HttpRequest:
        """The request for the log-probability, at temperature 1, of each of two or more tokens but the first."""
        raise NotImplementedError

    def parse_given_tokens(self, answer: Any, tokens: list[int]) -> list[GivenToken]:
        """One entry per token but the first; BadAnswerError when the answer does not match the request."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One completion to sample; `prompt_T` holds plain integers, as JSON needs them.

    `model` is the server's name for the base model, `adapter` the name of the adapter on it, empty for none.
    `max_tokens` fits the context, so a shorter cut is an error. `top` is the number of likeliest alternatives to report
    at each position. Requests with different `cache_salt` share no cached keys and values.
    """

    prompt_T: list[int]
    seed: int
    max_tokens: int
    temperature: float
    model: str
    adapter: str
    stop_ids: frozenset[int]
    vocabulary: int
    top: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCompletion:
    """A server's answer, unchecked; None where it reports nothing.

    `tops` are the log-probabilities of the likeliest first tokens, by `token_id:N` where the server gives the id,
    otherwise by text. `experts` are the experts of each token that was read, [tokens, layers, experts per
    token], as a file of NumPy in base64.
    """

    tokens: Sequence[Any] | None
    logprobs: Sequence[Any] | None
    finish_reason: str | None
    prompt: Sequence[Any] | None = None
    model: str | None = None
    tops: dict[str, float] | None = None
    experts: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A completion that the requested distribution could have produced."""

    tokens_T: Tokens
    logprobs_T: Floats
    stop_reason: StopReason
    tops: dict[str, float]
    experts_TLK: Experts | None = None  # of all tokens but the last, prompt included


def checked(raw: RawCompletion, request: CompletionRequest) -> Completion:
    expected = request.adapter or request.model
    if raw.model is not None and raw.model != expected:
        raise OtherModelError(f"{raw.model!r} answered instead of {expected!r}")
    if raw.prompt is not None and list(raw.prompt) != request.prompt_T:
        raise BadAnswerError("the server read another prompt than it was sent")
    if not raw.tokens:
        raise BadAnswerError("the answer holds no token ids")
    if len(raw.tokens) > request.max_tokens:
        raise BadAnswerError(f"{len(raw.tokens)} tokens, more than the {request.max_tokens} requested")
    for token in raw.tokens:
        if type(token) is not int or not 0 <= token < request.vocabulary:
            raise BadAnswerError(f"{token!r} is not the id of one of the model's {request.vocabulary} tokens")
    tokens_T = np.asarray(raw.tokens, dtype=np.int64)
    count = len(tokens_T)
    if raw.logprobs is None:
        raise BadAnswerError("the answer holds no log-probabilities")
    if len(raw.logprobs) != count:
        raise BadAnswerError(f"{len(raw.logprobs)} log-probabilities for {count} tokens")
    for value in raw.logprobs:
        if type(value) not in (int, float) or not math.isfinite(value) or value > ROUNDING:
            raise BadAnswerError(f"{value!r} is not a log-probability")
    return Completion(
        tokens_T=tokens_T,
        logprobs_T=np.minimum(np.asarray(raw.logprobs, dtype=np.float64), 0.0),
        stop_reason=_stop_reason(raw.finish_reason, tokens_T, request),
        tops=raw.tops or {},
        experts_TLK=None if raw.experts is None else _experts(raw.experts, len(request.prompt_T) + len(tokens_T) - 1),
    )


def _experts(text: str, count: int) -> Experts:
    try:
        found = np.lib.format.read_array(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except Exception:  # a damaged header may raise an error of any class
        raise BadAnswerError("the experts of the answer cannot be read") from None
    if found.ndim != 3 or len(found) != count or found.dtype.kind not in "iu":
        raise BadAnswerError(f"{found.dtype} experts of shape {list(found.shape)} for {count} tokens that were read")
    # Numbers beyond these are of no model, and the trainer refuses them.
    return found.astype(np.int64).clip(-2, np.iinfo(np.int16).max).astype(np.int16)


def _stop_reason(reason: str | None, tokens_T: Tokens, request: CompletionRequest) -> StopReason:
    stops = np.isin(tokens_T, list(request.stop_ids))
    if stops[:-1].any():
        raise BadAnswerError("the completion continues after an end-of-sequence token")
    # Some servers report "length" when the end-of-sequence token is also the last one allowed.
    if stops[-1]:
        if reason in STOP_REASONS or (reason in LENGTH_REASONS and len(tokens_T) == request.max_tokens):
            return StopReason.EOS
    elif reason in LENGTH_REASONS:
        if len(tokens_T) < request.max_tokens:
            raise BadAnswerError(f"cut off after {len(tokens_T)} of {request.max_tokens} tokens")
        return StopReason.LENGTH
    elif reason in STOP_REASONS:
        raise BadAnswerError(f"stopped at token {int(tokens_T[-1])}: it does not end a sequence of this model")
    raise BadAnswerError(f"finish reason {reason!r}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Caller:
    """Client, dialect and model.

    `served` maps a server's URL to its name of the model. `context_limit` is the smallest known one.
    """

    client: Client
    dialect: Dialect
    served: dict[str, ServedModel]
    stop_ids: frozenset[int]
    vocabulary: int
    context_limit: int | None

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.client.pool.servers

    @property
    def present(self) -> tuple[Server, ...]:
        """The servers that have answered so far."""
        return tuple(server for server in self.servers if server.url in self.served)

    def completion(
        self,
        prompt_T: Tokens,
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        key: str = "",
        adapter: str = "",
        server: Server | None = None,
        top: int = 0,
        cache_salt: str = "",
        label: str = "a completion",
    ) -> Call[Completion]:
        """Return the call for one completion of at most `max_tokens`, fewer where the context has no room.

        Either from the policy version `key`, by any server that holds it, or from an `adapter` of one `server`, empty
        for the base model.
        """
        room = max_tokens if self.context_limit is None else min(max_tokens, self.context_limit - len(prompt_T))
        prompt = prompt_T.tolist()

        def addressed(server: Server) -> Call[Completion]:
            request = CompletionRequest(
                prompt_T=prompt,
                seed=seed,
                max_tokens=room,
                temperature=temperature,
                model=self.served[server.url].name,
                adapter=server.names[key] if key else adapter,
                stop_ids=self.stop_ids,
                vocabulary=self.vocabulary,
                top=top,
                cache_salt=cache_salt,
            )
            path, body = self.dialect.completion(request)

            def read(answer: Any) -> Completion:
                return checked(self.dialect.parse_completion(answer, request), request)

            return Call(path=path, body=body, read=read, server=server, label=label)

        if server is not None:
            return addressed(server)
        return Call(path="", key=key, addressed=addressed, label=label)

    def admin_call(self, request: HttpRequest, server: Server, label: str) -> Call[None]:
        path, body = request
        call: Call[None] = Call(path=path, body=body, read=lambda answer: None, server=server, label=label)
        return replace(call, ignores_answer=True, urls=self.client.admin_urls)


def vocabulary_of(policy: Policy, tokenizer: Any) -> int:
    """Return the number of the model's token ids, padding rows included; the tokenizer's where unknown."""
    path = Path(policy.model_path)
    known = len(tokenizer)
    with suppress(OSError, ValueError, AttributeError, TypeError):
        if not path.is_dir():
            from transformers.utils import cached_file  # heavy: only for a model from the hub

            path = Path(cached_file(policy.model_path, "config.json", local_files_only=True)).parent
        # A model's padding rows have ids above the tokenizer's, and can be sampled.
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        known = max(known, int((config.get("text_config") or config).get("vocab_size") or 0))
    return known
