"""Engine `mlx`: the server of MLX-LM, which takes prompts as text and adapters in MLX's own format.

Requests carry no seed: MLX-LM batches only those without one.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.engines.answers import CompletionRequest, RawCompletion
from retrain.engines.client import BadAnswerError, OtherModelError
from retrain.engines.dialect import CommonRoutes, HttpRequest, ServedModel
from retrain.engines.engine import ServerEngine, create
from retrain.engines.mlx_adapter import convert
from retrain.engines.policy import Policy
from retrain.engines.table import DEFAULT_URLS
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, ConfigError, Problem

CONVERTED = "mlx"  # folder of the converted copy, inside that of the adapter
NEVER = -1e9  # logit bias of a token that must not be sampled
MAX_CONCURRENT = 8  # per server: each request opens a connection, and beyond five waiting ones it resets them


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy, its servers checked and given the policy; ConfigError for unsupported keys."""
    table = context.config.inference
    if not table.prefix_caching:
        what = "MLX-LM always caches the keys and values of prompts"
        fix = "set prefix_caching = true; each policy version has its own cache"
        raise ConfigError(Problem(where=context.config.place("inference.prefix_caching"), what=what, fix=fix))
    limit = MAX_CONCURRENT * (table.url.count(",") + 1)
    limited = table.model_copy(update={"max_concurrent": min(table.max_concurrent, limit)})
    config = replace(context.config, tables={**context.config.tables, "inference": limited})
    return create(MLX(context.tokenizer, policy.model_path), replace(context, config=config), policy)


class MLX(CommonRoutes):
    """MLX-LM 0.32 or later.

    The server loads whatever model and adapter a request names, so every request names both by path; "default_model"
    would be served without an adapter. It identifies adapters by path and does not read a path twice, so each version
    has its own.
    """

    name = "mlx"
    product = "an MLX-LM"
    default_url = DEFAULT_URLS["mlx"]
    start_hint = "a version that returns log-probabilities after temperature (0.32 has no option for it)"
    adapter_hint = "MLX-LM 0.32 or later, and read access to that folder"

    def __init__(self, tokenizer: Any, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path
        self._adapters: dict[str, Path] = {}

    def models(self) -> HttpRequest:
        """See `Dialect.models`; /v1/models lists the hub's cache, not the served model, and fails without a cache."""
        return "/health", None

    def parse_models(self, answer: Any) -> list[ServedModel]:
        """See `Dialect.parse_models`."""
        if not isinstance(answer, dict) or answer.get("status") != "ok":
            raise BadAnswerError("this is not the server of MLX-LM")
        return [ServedModel(name=self._model_path)]

    def completion(self, request: CompletionRequest) -> HttpRequest:
        """See `Dialect.completion`; BackendError for a prompt that no text encodes to."""
        body: dict[str, Any] = self._model(request.adapter) | {
            "prompt": self._text(request.prompt_T),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "xtc_probability": 0.0,
            "repetition_penalty": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": True,
        }
        if request.top:
            # The answer then names the likeliest tokens instead of the sampled ones. Callers read only the
            # alternatives, but an early end would look like a fault, so the completion must not end.
            stops = {str(token): NEVER for token in sorted(request.stop_ids)}
            body |= {"top_logprobs": request.top, "logit_bias": stops}
        return "/v1/completions", body

    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        """See `Dialect.parse_completion`."""
        try:
            choice, num_read = answer["choices"][0], answer["usage"]["prompt_tokens"]
            content = (choice.get("logprobs") or {}).get("content")
            reason = choice.get("finish_reason")
            if answer.get("model") != self._model_path:
                raise OtherModelError(f"asked {self._model_path!r}, and {answer.get('model')!r} answered")
            if num_read != len(request.prompt_T):
                raise BadAnswerError(
                    f"the server read a prompt of {num_read} tokens, and {len(request.prompt_T)} were sent"
                )
            if content is None:
                return RawCompletion(tokens=None, logprobs=None, finish_reason=reason)
            tokens = [entry["id"] for entry in content]
            logprobs = [entry["logprob"] for entry in content]
            tops = (
                {f"token_id:{top['id']}": float(top["logprob"]) for top in content[0]["top_logprobs"]}
                if request.top
                else None
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise BadAnswerError("the answer holds no completion") from None
        # The server stops only at the end tokens in the model's files, which may be fewer than ours. Cutting at the
        # first of ours gives what it would have sampled had it stopped there.
        length = next((index + 1 for index, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
        is_stopped = length < len(tokens) or reason == "tool_calls"  # a stop after a tool call
        return RawCompletion(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            finish_reason="stop" if is_stopped else reason,
            tops=tops,
        )

    def load_adapter(self, name: str, folder: Path) -> HttpRequest:
        """See `Dialect.load_adapter`: a request for one token, which makes the server read the adapter."""
        converted = folder / CONVERTED
        if not converted.exists():
            convert(folder, converted)
        self._adapters[name] = converted
        return "/v1/completions", self._model(name) | {"prompt": "0", "max_tokens": 1}

    def unload_adapter(self, name: str) -> HttpRequest:
        """See `Dialect.unload_adapter`; the server drops an adapter when it reads the next one."""
        converted = self._adapters.pop(name, None)
        if converted is not None:
            shutil.rmtree(converted, ignore_errors=True)
        return self.models()

    def _model(self, adapter: str) -> dict[str, Any]:
        """The fields that name the model; no draft model, because with one the server stops batching."""
        path = str(self._adapters[adapter]) if adapter else None
        return {"model": self._model_path, "adapters": path, "draft_model": None}

    def _text(self, prompt_T: list[int]) -> str:
        """The text that the tokenizer encodes to exactly this prompt, including the special tokens it adds itself."""
        for ids in (prompt_T, prompt_T[1:]):  # the second without the token that the tokenizer prepends
            text = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if text and self._tokenizer(text)["input_ids"] == prompt_T:
                return text
        what = f"a prompt of {len(prompt_T)} tokens cannot be sent exactly: its text encodes to other tokens"
        why = "MLX-LM takes prompts only as text"
        fix = 'use an engine that takes token ids: "pytorch" or "vllm"'
        raise BackendError(Problem(where="[inference] engine", what=what, why=why, fix=fix))
