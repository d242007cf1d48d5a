"""Engine `openai`: any server with OpenAI's `/v1/completions` that returns its tokens and accepts PEFT adapters.

It requests ids in every known way. If only texts come back, each must name exactly one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, HttpRequest, RawCompletion
from retrain.engines.engine import ServerEngine, create
from retrain.engines.policy import Policy
from retrain.engines.vllm import VLLM
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem

# Other servers of OpenAI's API may refuse these.
VLLM_ONLY = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "cache_salt")
ID_PREFIX = "token_id:"  # some servers write the id itself in place of the text


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    if not context.config.inference.prefix_caching:
        where, what = context.config.place("inference.prefix_caching"), "OpenAI's requests cannot turn it off"
        fix = "turn it off in the server's own options"
        raise ConfigError(Problem(code="engine.caching-not-controllable", where=where, what=what, fix=fix))
    return create(OpenAI(TextIds(context.tokenizer)), context, policy)


class OpenAI(VLLM):
    """The fields that all such servers share; adapters are loaded as in vLLM."""

    name = "openai"
    start_hint = "log-probabilities after temperature, if it has such an option"
    adapter_hint = "a route /v1/load_lora_adapter"

    def __init__(self, text_ids: TextIds) -> None:
        self._text_ids = text_ids

    def completion(self, request: CompletionRequest) -> HttpRequest:
        path, body = super().completion(request)
        kept = {name: value for name, value in (body or {}).items() if name not in VLLM_ONLY}
        return path, kept | {"return_tokens_as_token_ids": True, "logprobs": max(1, request.top)}

    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        raw = super().parse_completion(answer, replace(request, top=max(1, request.top)))
        if raw.tokens is not None:
            return raw
        texts = (answer["choices"][0].get("logprobs") or {}).get("tokens")
        if not isinstance(texts, list):
            raise BadAnswerError("the answer holds neither token ids nor the texts of tokens")
        return replace(raw, tokens=self._text_ids.ids(texts))


class TextIds:
    """The tokens of a tokenizer by the text that a server shows for them.

    In a byte-level vocabulary several tokens share one text (fragments of a character all show as the replacement
    character). Such a text identifies no token and is refused: re-encoding the completion would only guess.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[Any]) -> list[int]:
        return list(map(self._id, texts))

    def _id(self, text: Any) -> int:
        if not isinstance(text, str):
            raise BadAnswerError(f"{text!r} is not the text of a token")
        digits = text.removeprefix(ID_PREFIX)
        if digits != text and digits.isdecimal():
            return int(digits)
        found = self._by_text.get(text, ())
        if len(found) != 1:
            reason = f"matches {len(found)} tokens" if found else "matches no token"
            raise BadAnswerError(f"the server returns no token ids, and the text {text!r} {reason}")
        return found[0]

    @cached_property
    def _by_text(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for token in range(len(self._tokenizer)):
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found[text] = (*found.get(text, ()), token)
        return found
