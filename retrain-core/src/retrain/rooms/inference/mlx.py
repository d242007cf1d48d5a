"""Engine `mlx`: the server of MLX-LM, which takes text, and adapters in MLX's own form.

Requests carry no seed: MLX-LM serves those that do one after the other, and the others in batches.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.serving import Policy
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.rooms.inference.answers import Asked, Said
from retrain.rooms.inference.client import BadAnswerError
from retrain.rooms.inference.dialect import Request, Served
from retrain.rooms.inference.engine import ServerEngine, create
from retrain.rooms.inference.mlx_adapter import convert
from retrain.rooms.inference.table import InferenceTable

CONVERTED = "mlx"  # folder of the converted copy, inside that of the adapter
NEVER = -1e9  # bias of a logit
AT_A_TIME = 8  # requests per server: each is a new connection, of which only five may wait, and others are reset


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy, its servers questioned and given the policy; ConfigError for what they cannot do."""
    table = context.config.table("inference", InferenceTable)
    if not table.prefix_caching:
        what = "MLX-LM keeps keys and values of prompts whatever a request says"
        fix = "set prefix_caching = true; each version of the policy has keys and values of its own"
        raise ConfigError(Problem(where=context.config.place("inference.prefix_caching"), what=what, fix=fix))
    limit = AT_A_TIME * (table.url.count(",") + 1)
    gentle = table.model_copy(update={"max_concurrent": min(table.max_concurrent, limit)})
    config = replace(context.config, tables={**context.config.tables, "inference": gentle})
    return create(MLX(context.tokenizer, policy.model_path), replace(context, config=config), policy)


class MLX:
    """The words of MLX-LM, 0.32 or later.

    The server loads whatever model and adapter a request names, so both are named in each, by their paths: it would
    serve "default_model" without any adapter. Adapters are known by path alone, one that is written again is not read
    again; each version has a path of its own.
    """

    name = "mlx"
    default_url = "http://127.0.0.1:8080"
    start_hint = "a version that gives log-probabilities after temperature (0.32 has no option for it)"
    adapter_hint = "MLX-LM 0.32 or later, where it can read that folder"

    def __init__(self, tokenizer: Any, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path
        self._adapters: dict[str, Path] = {}

    def models(self) -> Request:
        """See `Dialect.models`; /v1/models lists the hub's cache, not what can be served, and fails without one."""
        return "/health", None

    def served(self, answer: Any) -> list[Served]:
        """See `Dialect.served`."""
        if not isinstance(answer, dict) or answer.get("status") != "ok":
            raise BadAnswerError("what answers there is not the server of MLX-LM")
        return [Served(name=self._model_path)]

    def completion(self, asked: Asked) -> Request:
        """See `Dialect.completion`; BackendError for a prompt that no text stands for."""
        body: dict[str, Any] = self._model(asked.adapter) | {
            "prompt": self._text(asked.prompt_T),
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "xtc_probability": 0.0,
            "repetition_penalty": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": True,
        }
        if asked.top:
            # The answer then names the likeliest tokens and not the drawn ones. Whoever asks for alternatives reads
            # only these, but one that ended early could not be told from a fault: this one does not end.
            stops = {str(token): NEVER for token in sorted(asked.stop_ids)}
            body |= {"top_logprobs": asked.top, "logit_bias": stops}
        return "/v1/completions", body

    def said(self, answer: Any, asked: Asked) -> Said:
        """See `Dialect.said`."""
        try:
            choice, read = answer["choices"][0], answer["usage"]["prompt_tokens"]
            content = (choice.get("logprobs") or {}).get("content")
            reason = choice.get("finish_reason")
            if answer.get("model") != self._model_path:
                raise BadAnswerError(f"asked {self._model_path!r}, and {answer.get('model')!r} answered")
            if read != len(asked.prompt_T):
                raise BadAnswerError(f"the server read a prompt of {read} tokens, and {len(asked.prompt_T)} were sent")
            if content is None:
                return Said(tokens=None, logprobs=None, finish_reason=reason)
            tokens = [entry["id"] for entry in content]
            logprobs = [entry["logprob"] for entry in content]
            tops = {str(top["id"]): float(top["logprob"]) for top in content[0]["top_logprobs"]} if asked.top else None
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise BadAnswerError("the answer holds no completion") from None
        # The server knows the end tokens of the model's files, which may be fewer than ours. What it drew up to the
        # first of ours is what it would have drawn had it stopped there.
        length = next((place + 1 for place, token in enumerate(tokens) if token in asked.stop_ids), len(tokens))
        is_stopped = length < len(tokens) or reason == "tool_calls"  # a "stop" behind a tool call
        return Said(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            finish_reason="stop" if is_stopped else reason,
            tops=tops,
        )

    def load_adapter(self, name: str, folder: Path) -> Request:
        """See `Dialect.load_adapter`: a request for one token, upon which the server reads the adapter."""
        converted = folder / CONVERTED
        if not converted.exists():
            convert(folder, converted)
        self._adapters[name] = converted
        return "/v1/completions", self._model(name) | {"prompt": "0", "max_tokens": 1}

    def unload_adapter(self, name: str) -> Request:
        """See `Dialect.unload_adapter`; the server forgets an adapter with the next that it reads."""
        converted = self._adapters.pop(name, None)
        if converted is not None:
            shutil.rmtree(converted, ignore_errors=True)
        return self.models()

    def load_weights(self, folder: Path) -> list[Request]:
        """See `Dialect.load_weights`."""
        what = "full weights cannot be sent to an MLX-LM server"
        fix = 'use engine = "vllm", or train an adapter'
        raise ConfigError(Problem(where="[inference] engine", what=what, fix=fix))

    def _model(self, adapter: str) -> dict[str, Any]:
        """What names the model; without a draft model, with which the server would give up batching."""
        path = str(self._adapters[adapter]) if adapter else None
        return {"model": self._model_path, "adapters": path, "draft_model": None}

    def _text(self, prompt_T: list[int]) -> str:
        """The text that the tokenizer turns into exactly this prompt, with the tokens that it puts around it itself."""
        for ids in (prompt_T, prompt_T[1:]):  # the second without a token that the tokenizer puts first
            text = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if text and self._tokenizer(text)["input_ids"] == prompt_T:
                return text
        what = f"a prompt of {len(prompt_T)} tokens cannot be sent exactly: its text encodes to other tokens"
        why = "MLX-LM takes prompts as text alone"
        fix = 'use an engine that takes token ids: "pytorch" or "vllm"'
        raise BackendError(Problem(where="[inference] engine", what=what, why=why, fix=fix))
