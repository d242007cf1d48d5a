"""Engine `vllm`: vLLM's OpenAI-compatible server, with token ids in both directions.

One request per completion rather than `n`: each has its own seed and is scored as soon as it finishes, and the server
shares the prompt's keys and values between them anyway.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from retrain.engines import dialect
from retrain.engines.client import BadAnswerError
from retrain.engines.engine import create
from retrain.engines.given_tokens import open_server


class VLLM(dialect.Dialect):
    """vLLM 0.10.2 or later (`return_token_ids`)."""

    name = "vllm"
    adapter_routes = "/v1"
    start_hint = "--logprobs-mode processed_logprobs"
    adapter_hint = "--enable-lora --max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"

    def completion(self, request: dialect.CompletionRequest) -> dialect.HttpRequest:
        """Only our own stop ids end a sequence, so the server's are ignored."""
        body: dict[str, Any] = {
            "model": request.adapter or request.model,
            "prompt": request.prompt_T,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            **dialect.FULL_DISTRIBUTION,
            "seed": request.seed,
            "logprobs": request.top,
            "return_token_ids": True,
            "stop_token_ids": sorted(request.stop_ids),
        }
        # Two tokens may share a text.
        body |= {"return_tokens_as_token_ids": True} if request.top else {}
        return "/v1/completions", body | ({"cache_salt": request.cache_salt} if request.cache_salt else {})

    @dialect.refusing("the answer holds no completion")
    def parse_completion(self, answer: Any, request: dialect.CompletionRequest) -> dialect.RawCompletion:
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs") or {}
        tops = logprobs.get("top_logprobs") or [None]
        return dialect.RawCompletion(
            tokens=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs"),
            finish_reason=choice.get("finish_reason"),
            prompt=choice.get("prompt_token_ids"),
            model=answer.get("model"),
            tops=dict(tops[0] or {}) if request.top else None,
            experts=choice.get("routed_experts"),
        )

    def given_tokens(self, tokens: list[int], model: str) -> dialect.HttpRequest:
        """The server insists on sampling one token; it is ignored."""
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return "/v1/completions", body

    @dialect.refusing("the answer holds no log-probabilities of the given tokens")
    def parse_given_tokens(self, answer: Any, tokens: list[int]) -> list[dialect.GivenToken]:
        """The answer has an object per position, from the id as text to its numbers; None for the first."""
        found = answer["choices"][0]["prompt_logprobs"]
        if found is None or len(found) != len(tokens):
            raise BadAnswerError(f"log-probabilities of {len(found or ())} tokens instead of {len(tokens)}")
        entries = [entry[str(token)] for entry, token in zip(found[1:], tokens[1:], strict=True)]
        return [dialect.GivenToken(logprob=entry["logprob"], text=entry.get("decoded_token")) for entry in entries]

    def load_weights(self, folder: Path) -> list[dialect.HttpRequest]:
        """Use the routes of PRIME-RL's server around vLLM."""
        return [
            ("/pause?mode=keep&clear_cache=false", {}),
            ("/update_weights", {"weight_dir": str(folder)}),
            ("/resume", {}),
        ]


create_engine, open_teacher = partial(create, VLLM()), partial(open_server, VLLM())
