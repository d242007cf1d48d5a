"""Engine `sglang`: SGLang's own `/generate`, whose log-probabilities are those after temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.serving import Policy
from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.inference.answers import Asked, Said
from retrain.rooms.inference.client import BadAnswerError
from retrain.rooms.inference.dialect import Request, Served, listed_models
from retrain.rooms.inference.engine import ServerEngine, create


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy, its servers questioned and given the policy."""
    return create(SGLang(), context, policy)


class SGLang:
    """The words of SGLang. A wrong model name is answered all the same, so the model is known by its numbers."""

    name = "sglang"
    default_url = "http://127.0.0.1:30000"
    start_hint = "no --rl-on-policy-target and no SGLANG_RETURN_ORIGINAL_LOGPROB"
    adapter_hint = "--enable-lora --max-lora-rank RANK --lora-target-modules all"

    def models(self) -> Request:
        """See `Dialect.models`."""
        return "/v1/models", None

    def served(self, answer: Any) -> list[Served]:
        """See `Dialect.served`."""
        return listed_models(answer)

    def completion(self, asked: Asked) -> Request:
        """See `Dialect.completion`."""
        params = {
            "max_new_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": sorted(asked.stop_ids),
            "skip_special_tokens": False,
        }
        body: dict[str, Any] = {"input_ids": asked.prompt_T, "sampling_params": params, "return_logprob": True}
        body |= {"top_logprobs_num": asked.top} if asked.top else {}
        body |= {"extra_key": asked.cache_salt} if asked.cache_salt else {}
        return "/generate", body | ({"lora_path": asked.adapter} if asked.adapter else {})

    def said(self, answer: Any, asked: Asked) -> Said:
        """See `Dialect.said`; the ids stand twice, and must agree."""
        try:
            meta = answer["meta_info"]
            triples = meta.get("output_token_logprobs")
            finish = meta.get("finish_reason") or {}
            tokens = answer.get("output_ids")
            if triples is not None and tokens is not None and [triple[1] for triple in triples] != tokens:
                raise BadAnswerError("the ids of the completion and of its log-probabilities differ")
            tops = (meta.get("output_top_logprobs") or [None])[0] or []
            return Said(
                tokens=tokens,
                logprobs=None if triples is None else [triple[0] for triple in triples],
                finish_reason=finish.get("type"),
                tops={str(top[1]): float(top[0]) for top in tops} if asked.top else None,
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise BadAnswerError("the answer holds no completion") from None

    def load_adapter(self, name: str, folder: Path) -> Request:
        """See `Dialect.load_adapter`."""
        return "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}

    def unload_adapter(self, name: str) -> Request:
        """See `Dialect.unload_adapter`."""
        return "/unload_lora_adapter", {"lora_name": name}

    def load_weights(self, folder: Path) -> list[Request]:
        """See `Dialect.load_weights`."""
        what = "full weights cannot be sent to an SGLang server"
        fix = 'use engine = "vllm", or train an adapter'
        raise ConfigError(Problem(where="[inference] engine", what=what, fix=fix))
