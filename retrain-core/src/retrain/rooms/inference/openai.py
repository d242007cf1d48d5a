"""Engine `openai`: any server with `/v1/completions` in OpenAI's form that shows its tokens and takes PEFT adapters.

Ids are asked for in every way that is known. Where only texts come back each must name one token and no other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.serving import Policy
from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.inference.answers import Asked, Said
from retrain.rooms.inference.client import BadAnswerError
from retrain.rooms.inference.dialect import Request
from retrain.rooms.inference.engine import ServerEngine, create
from retrain.rooms.inference.text_ids import TextIds
from retrain.rooms.inference.vllm import VLLM

FOREIGN = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "cache_salt")  # not OpenAI's


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy, its servers questioned and given the policy."""
    if not context.config.value("inference.prefix_caching", True):
        where, what = context.config.place("inference.prefix_caching"), "OpenAI's requests cannot turn it off"
        raise ConfigError(Problem(where=where, what=what, fix="turn it off in the server's own options"))
    return create(OpenAI(TextIds(context.tokenizer)), context, policy)


class OpenAI(VLLM):
    """The words that all such servers share; adapters are loaded the way vLLM does it."""

    name = "openai"
    start_hint = "log-probabilities after temperature, if it has such an option"
    adapter_hint = "a route /v1/load_lora_adapter"

    def __init__(self, text_ids: TextIds) -> None:
        self._text_ids = text_ids

    def completion(self, asked: Asked) -> Request:
        """See `Dialect.completion`."""
        path, body = super().completion(asked)
        kept = {name: value for name, value in (body or {}).items() if name not in FOREIGN}
        return path, kept | {"return_tokens_as_token_ids": True, "logprobs": max(1, asked.top)}

    def said(self, answer: Any, asked: Asked) -> Said:
        """See `Dialect.said`."""
        said = super().said(answer, replace(asked, top=max(1, asked.top)))
        if said.tokens is not None:
            return said
        texts = (answer["choices"][0].get("logprobs") or {}).get("tokens")
        if not isinstance(texts, list):
            raise BadAnswerError("the answer holds neither token ids nor the texts of tokens")
        return replace(said, tokens=self._text_ids.ids(texts))
