"""Engine `openai`: any server with OpenAI's `/v1/completions` that returns its tokens and accepts PEFT adapters.

It requests ids in every way that servers are known to offer. Where only texts come back, each must name exactly one
token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retrain.engines.answers import CompletionRequest, RawCompletion
from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import HttpRequest
from retrain.engines.engine import ServerEngine, create
from retrain.engines.policy import Policy
from retrain.engines.text_ids import TextIds
from retrain.engines.vllm import VLLM
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem

VLLM_ONLY = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "cache_salt")  # not OpenAI's


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy, its servers checked and given the policy."""
    if not context.config.inference.prefix_caching:
        where, what = context.config.place("inference.prefix_caching"), "OpenAI's requests cannot turn it off"
        raise ConfigError(Problem(where=where, what=what, fix="turn it off in the server's own options"))
    return create(OpenAI(TextIds(context.tokenizer)), context, policy)


class OpenAI(VLLM):
    """The fields that all such servers share; adapters are loaded as in vLLM."""

    name = "openai"
    start_hint = "log-probabilities after temperature, if it has such an option"
    adapter_hint = "a route /v1/load_lora_adapter"

    def __init__(self, text_ids: TextIds) -> None:
        self._text_ids = text_ids

    def completion(self, request: CompletionRequest) -> HttpRequest:
        """See `Dialect.completion`."""
        path, body = super().completion(request)
        kept = {name: value for name, value in (body or {}).items() if name not in VLLM_ONLY}
        return path, kept | {"return_tokens_as_token_ids": True, "logprobs": max(1, request.top)}

    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        """See `Dialect.parse_completion`."""
        raw = super().parse_completion(answer, replace(request, top=max(1, request.top)))
        if raw.tokens is not None:
            return raw
        texts = (answer["choices"][0].get("logprobs") or {}).get("tokens")
        if not isinstance(texts, list):
            raise BadAnswerError("the answer holds neither token ids nor the texts of tokens")
        return replace(raw, tokens=self._text_ids.ids(texts))
