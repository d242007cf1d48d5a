"""Engine `max`: `max serve` of Modular's MAX takes token ids and returns only texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, Dialect, HttpRequest, RawCompletion, ServedModel, refusing
from retrain.engines.engine import ServerEngine, create
from retrain.engines.openai import TextIds
from retrain.engines.policy import Policy
from retrain.engines.vllm import VLLM
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """Make the engine; ConfigError without a URL: in-process MAX returns no log-probabilities."""
    if not context.config.inference.url:
        what = "MAX cannot sample in this process: its in-process API returns texts without log-probabilities"
        fix = 'start "max serve" and set [inference] url to it (http://127.0.0.1:8000 by default)'
        where = context.config.place("inference.url")
        raise ConfigError(Problem(code="engine.no-url", where=where, what=what, fix=fix))
    return create(MAX(TextIds(context.tokenizer)), context, policy)


class MAX(VLLM):
    """MAX 26.6; adapters are loaded as in vLLM, and only on a GPU.

    Log-probabilities are keyed by the token's text without special tokens, so the token that ends a completion reads
    "". An answer with a text that does not name exactly one token is refused.
    """

    name = "max"
    product = "a MAX"
    start_hint = "a version that returns log-probabilities after temperature (26.6 has no option for it)"
    adapter_hint = (
        "--enable-lora --max-lora-rank RANK --no-enable-prefix-caching --prefer-module-v3 "
        "--no-enable-overlap-scheduler, on a GPU"
    )

    def __init__(self, text_ids: TextIds) -> None:
        self._text_ids = text_ids

    def parse_models(self, answer: Any) -> list[ServedModel]:
        """Take the first entry: the model comes first in the list, its adapters after it."""
        return super().parse_models(answer)[:1]

    def completion(self, request: CompletionRequest) -> HttpRequest:
        path, body = super().completion(request)
        # MAX answers 400 to an unknown field
        kept = {name: value for name, value in (body or {}).items() if name != "return_token_ids"}
        return path, kept | {"logprobs": max(1, request.top)}

    @refusing("the answer holds no completion")
    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        logprobs = answer["choices"][0].get("logprobs") or {}
        values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
        if not values or not tops:
            raise BadAnswerError("the answer holds no log-probabilities")
        texts = [_sampled_text(value, top) for value, top in zip(values, tops, strict=True)]
        raw = super().parse_completion(answer, request)
        return replace(raw, tokens=self._ids(texts, request, is_ended=raw.finish_reason == "stop"))

    load_weights = Dialect.load_weights

    def _ids(self, texts: list[str], request: CompletionRequest, *, is_ended: bool) -> list[int]:
        if not is_ended or texts[-1] != "":
            return self._text_ids.ids(texts)
        if len(request.stop_ids) != 1:
            raise BadAnswerError(f"it ended with one of {len(request.stop_ids)} end tokens, and does not report which")
        return [*self._text_ids.ids(texts[:-1]), *request.stop_ids]


def _sampled_text(value: float, top: dict[str, float]) -> str:
    found = [text for text, other in top.items() if other == value]
    if len(found) != 1:
        raise BadAnswerError(f"{len(found)} tokens have the log-probability of the sampled one")
    return found[0]
