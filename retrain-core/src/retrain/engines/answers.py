"""A completion as a server returns it, and the checks it must pass before anything uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.engines.client import BadAnswerError, OtherModelError
from retrain.kernel.types import Floats, StopReason, Tokens

ROUNDING = 1e-3  # nats by which rounding may lift a log-probability above 0
LENGTH_REASONS = frozenset({"length", "max_tokens"})
STOP_REASONS = frozenset({"stop", "eos", "stop_token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One completion to sample; `prompt_T` holds plain integers, as they are sent.

    `model` is the server's name for the base model, `adapter` the name of the adapter on it, empty for none.
    `max_tokens` fits the context, so a shorter cut is an error. `top` asks for that many of the likeliest alternatives
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
    """A server's answer, unchecked; None stands for what it does not report.

    `tops` are the log-probabilities of the likeliest first tokens, by `token_id:N` where the server says the id, else
    by text.
    """

    tokens: Sequence[Any] | None
    logprobs: Sequence[Any] | None
    finish_reason: str | None
    prompt: Sequence[Any] | None = None
    model: str | None = None
    tops: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A completion that the requested distribution could have produced."""

    tokens_T: Tokens
    logprobs_T: Floats
    stop_reason: StopReason
    tops: dict[str, float]


def checked(raw: RawCompletion, request: CompletionRequest) -> Completion:
    """The completion; BadAnswerError unless every part of it matches the request."""
    expected = request.adapter or request.model
    if raw.model is not None and raw.model != expected:
        raise OtherModelError(f"asked {expected!r}, and {raw.model!r} answered")
    if raw.prompt is not None and list(raw.prompt) != request.prompt_T:
        raise BadAnswerError("the server read another prompt than it was sent")
    tokens_T = _tokens(raw, request)
    return Completion(
        tokens_T=tokens_T,
        logprobs_T=_logprobs(raw.logprobs, len(tokens_T)),
        stop_reason=_stop_reason(raw.finish_reason, tokens_T, request),
        tops=raw.tops or {},
    )


def _tokens(raw: RawCompletion, request: CompletionRequest) -> Tokens:
    if raw.tokens is None:
        raise BadAnswerError("the answer holds no token ids")
    if not raw.tokens:
        raise BadAnswerError("the answer holds no token")
    if len(raw.tokens) > request.max_tokens:
        raise BadAnswerError(f"asked for {request.max_tokens} tokens, got {len(raw.tokens)}")
    for token in raw.tokens:
        if type(token) is not int or not 0 <= token < request.vocabulary:
            raise BadAnswerError(f"{token!r} is not the id of one of the model's {request.vocabulary} tokens")
    return np.asarray(raw.tokens, dtype=np.int64)


def _logprobs(values: Sequence[Any] | None, count: int) -> Floats:
    if values is None:
        raise BadAnswerError("the answer holds no log-probabilities")
    if len(values) != count:
        raise BadAnswerError(f"{len(values)} log-probabilities for {count} tokens")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > ROUNDING:
            raise BadAnswerError(f"{value!r} is not a log-probability")
    return np.minimum(np.asarray(values, dtype=np.float64), 0.0)


def _stop_reason(reason: str | None, tokens_T: Tokens, request: CompletionRequest) -> StopReason:
    stops = np.isin(tokens_T, list(request.stop_ids))
    if stops[:-1].any():
        raise BadAnswerError("the completion goes on after an end-of-sequence token")
    if stops[-1]:  # some servers report "length" when the end-of-sequence token is also the last one allowed
        if reason in STOP_REASONS or (reason in LENGTH_REASONS and len(tokens_T) == request.max_tokens):
            return StopReason.EOS
    elif reason in LENGTH_REASONS:
        if len(tokens_T) < request.max_tokens:
            raise BadAnswerError(f"asked for {request.max_tokens} tokens, cut off after {len(tokens_T)}")
        return StopReason.LENGTH
    elif reason in STOP_REASONS:
        raise BadAnswerError(f"stopped at token {int(tokens_T[-1])}, which does not end a sequence of this model")
    raise BadAnswerError(f"finish reason {reason!r}")
