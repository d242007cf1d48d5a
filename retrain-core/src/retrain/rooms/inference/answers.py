"""What a server said about one completion, checked before anything is done with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.kernel.types import Floats, StopReason, Tokens
from retrain.rooms.inference.client import BadAnswerError

ROUNDING = 1e-3  # nats by which a log-probability may stand above 0
LENGTH_REASONS = frozenset({"length", "max_tokens"})
STOP_REASONS = frozenset({"stop", "eos", "stop_token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request wants; `prompt_T` are plain integers, as they are sent.

    `model` is the server's own name of the base model, `adapter` that of the adapter on it, empty for none.
    `max_tokens` fit the context, so a completion that is cut earlier is wrong. `top` asks for the likeliest
    alternatives of each token. Requests with different `cache_salt` share no cached keys and values.
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
class Said:
    """The server's words: ids, log-probabilities, why it stopped; None where it does not tell.

    `tops` are the log-probabilities of the likeliest first tokens, by whatever the server calls them.
    """

    tokens: Sequence[Any] | None
    logprobs: Sequence[Any] | None
    finish_reason: str | None
    prompt: Sequence[Any] | None = None
    model: str | None = None
    tops: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """A completion that could have been drawn as asked."""

    tokens_T: Tokens
    logprobs_T: Floats
    stop_reason: StopReason
    tops: dict[str, float]


def checked(said: Said, asked: Asked) -> Drawn:
    """The completion; BadAnswerError unless every part of it is what was asked for."""
    wanted = asked.adapter or asked.model
    if said.model is not None and said.model != wanted:
        raise BadAnswerError(f"asked {wanted!r}, and {said.model!r} answered")
    if said.prompt is not None and list(said.prompt) != asked.prompt_T:
        raise BadAnswerError("the server read another prompt than it was sent")
    tokens_T = _tokens(said, asked)
    return Drawn(
        tokens_T=tokens_T,
        logprobs_T=_logprobs(said.logprobs, len(tokens_T)),
        stop_reason=_stop_reason(said.finish_reason, tokens_T, asked),
        tops=said.tops or {},
    )


def _tokens(said: Said, asked: Asked) -> Tokens:
    if said.tokens is None:
        raise BadAnswerError("the answer holds no token ids")
    if not said.tokens:
        raise BadAnswerError("the answer holds no token")
    if len(said.tokens) > asked.max_tokens:
        raise BadAnswerError(f"asked for {asked.max_tokens} tokens, got {len(said.tokens)}")
    for token in said.tokens:
        if type(token) is not int or not 0 <= token < asked.vocabulary:
            raise BadAnswerError(f"{token!r} is not the id of one of the model's {asked.vocabulary} tokens")
    return np.asarray(said.tokens, dtype=np.int64)


def _logprobs(values: Sequence[Any] | None, count: int) -> Floats:
    if values is None:
        raise BadAnswerError("the answer holds no log-probabilities")
    if len(values) != count:
        raise BadAnswerError(f"{len(values)} log-probabilities for {count} tokens")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > ROUNDING:
            raise BadAnswerError(f"{value!r} is not a log-probability")
    return np.minimum(np.asarray(values, dtype=np.float64), 0.0)


def _stop_reason(reason: str | None, tokens_T: Tokens, asked: Asked) -> StopReason:
    stops = np.isin(tokens_T, list(asked.stop_ids))
    if stops[:-1].any():
        raise BadAnswerError("the completion goes on after an end-of-sequence token")
    if stops[-1]:  # some servers call it "length" when it is also the last token that was asked for
        if reason in STOP_REASONS or (reason in LENGTH_REASONS and len(tokens_T) == asked.max_tokens):
            return StopReason.EOS
    elif reason in LENGTH_REASONS:
        if len(tokens_T) < asked.max_tokens:
            raise BadAnswerError(f"asked for {asked.max_tokens} tokens, cut off after {len(tokens_T)}")
        return StopReason.LENGTH
    elif reason in STOP_REASONS:
        raise BadAnswerError(f"stopped at token {int(tokens_T[-1])}, which does not end a sequence of this model")
    raise BadAnswerError(f"finish reason {reason!r}")
