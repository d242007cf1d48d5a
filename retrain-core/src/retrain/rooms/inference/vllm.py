"""Engine `vllm`: vLLM's OpenAI-compatible server, with token ids both ways.

One request per completion rather than `n`: each has a seed of its own, is scored as soon as it is finished, and the
server shares the prompt's keys and values between them anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.serving import Policy
from retrain.rooms.inference.answers import Asked, Said
from retrain.rooms.inference.client import BadAnswerError
from retrain.rooms.inference.dialect import Request, Served, listed_models
from retrain.rooms.inference.engine import ServerEngine, create


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy, its servers questioned and given the policy."""
    return create(VLLM(), context, policy)


class VLLM:
    """The words of vLLM, 0.10.2 or later (`return_token_ids`)."""

    name = "vllm"
    default_url = "http://127.0.0.1:8000"
    start_hint = "--logprobs-mode processed_logprobs"
    adapter_hint = "--enable-lora --max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"

    def models(self) -> Request:
        """See `Dialect.models`."""
        return "/v1/models", None

    def served(self, answer: Any) -> list[Served]:
        """See `Dialect.served`."""
        return listed_models(answer)

    def completion(self, asked: Asked) -> Request:
        """See `Dialect.completion`. The ids that end a sequence are ours alone, so the server's own are ignored."""
        body: dict[str, Any] = {
            "model": asked.adapter or asked.model,
            "prompt": asked.prompt_T,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": asked.seed,
            "logprobs": asked.top,
            "return_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": sorted(asked.stop_ids),
        }
        return "/v1/completions", body | ({"cache_salt": asked.cache_salt} if asked.cache_salt else {})

    def said(self, answer: Any, asked: Asked) -> Said:
        """See `Dialect.said`."""
        try:
            choice = answer["choices"][0]
            logprobs = choice.get("logprobs") or {}
            tops = logprobs.get("top_logprobs") or [None]
            return Said(
                tokens=choice.get("token_ids"),
                logprobs=logprobs.get("token_logprobs"),
                finish_reason=choice.get("finish_reason"),
                prompt=choice.get("prompt_token_ids"),
                model=answer.get("model"),
                tops=dict(tops[0] or {}) if asked.top else None,
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise BadAnswerError("the answer holds no completion") from None

    def load_adapter(self, name: str, folder: Path) -> Request:
        """See `Dialect.load_adapter`; never `load_inplace`, which changes weights in the middle of a completion."""
        return "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}

    def unload_adapter(self, name: str) -> Request:
        """See `Dialect.unload_adapter`."""
        return "/v1/unload_lora_adapter", {"lora_name": name}

    def load_weights(self, folder: Path) -> list[Request]:
        """See `Dialect.load_weights`; the routes are those of PRIME-RL's server around vLLM."""
        return [
            ("/pause?mode=keep&clear_cache=false", {}),
            ("/update_weights", {"weight_dir": str(folder)}),
            ("/resume", {}),
        ]
