"""Engine `mlx`: the server of MLX-LM takes prompts as text and adapters in MLX's own format.

Requests carry no seed: MLX-LM batches only those without one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from retrain.engines.client import BadAnswerError, OtherModelError
from retrain.engines.dialect import CompletionRequest, Dialect, HttpRequest, RawCompletion, ServedModel, refusing
from retrain.engines.engine import ServerEngine, create
from retrain.engines.policy import Policy
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, ConfigError, Problem

CONVERTED = "mlx"  # folder of the converted copy, inside the adapter's
NEVER = -1e9  # logit bias of a token that must not be sampled
# Per server: each request opens a connection, and a server with more than five waiting ones resets them.
MAX_CONCURRENT = 8
# PEFT adds scale * B @ A to a weight, with A [r, in] and B [out, r]. MLX-LM stores lora_a = A^T and lora_b = B^T, with
# scale = alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA, and its own `adapter_config.json`.
PREFIX = "base_model.model."
NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
LAYER = re.compile(r".*?\blayers\.\d+\.")
ALL_LAYERS = -1
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
# Features that MLX-LM's LoRA lacks, with the values that mean they are off.
UNUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
}


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    table = context.config.inference
    if not table.prefix_caching:
        what = "MLX-LM always caches the keys and values of prompts"
        fix = "set prefix_caching = true; each policy version has its own cache"
        where = context.config.place("inference.prefix_caching")
        raise ConfigError(Problem(code="engine.always-caches", where=where, what=what, fix=fix))
    limit = MAX_CONCURRENT * (table.url.count(",") + 1)
    limited = table.model_copy(update={"max_concurrent": min(table.max_concurrent, limit)})
    config = replace(context.config, tables={**context.config.tables, "inference": limited})
    return create(MLX(context.tokenizer, policy.model_path), replace(context, config=config), policy)


class MLX(Dialect):
    """MLX-LM 0.32 or later.

    The server loads whatever model and adapter a request names, so every request names both by path; "default_model"
    would be served without an adapter. It identifies adapters by path and does not read a path twice, so each version
    has its own.
    """

    name = "mlx"
    product = "an MLX-LM"
    start_hint = "a version that returns log-probabilities after temperature (0.32 has no option for it)"
    adapter_hint = "MLX-LM 0.32 or later, and read access to that folder"

    def __init__(self, tokenizer: Any, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path
        self._adapters: dict[str, Path] = {}

    def models(self) -> HttpRequest:
        """Request /health: /v1/models lists the hub's cache, not the served model, and fails without a cache."""
        return "/health", None

    def parse_models(self, answer: Any) -> list[ServedModel]:
        if not isinstance(answer, dict) or answer.get("status") != "ok":
            raise BadAnswerError("this is not the server of MLX-LM")
        return [ServedModel(name=self._model_path)]

    def completion(self, request: CompletionRequest) -> HttpRequest:
        """Raises BackendError for a prompt that no text encodes to."""
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

    @refusing("the answer holds no completion")
    def parse_completion(self, answer: Any, request: CompletionRequest) -> RawCompletion:
        choice, num_read = answer["choices"][0], answer["usage"]["prompt_tokens"]
        content = (choice.get("logprobs") or {}).get("content")
        reason = choice.get("finish_reason")
        if answer.get("model") != self._model_path:
            raise OtherModelError(f"{answer.get('model')!r} answered instead of {self._model_path!r}")
        if num_read != len(request.prompt_T):
            told = f"the server read a prompt of {num_read} tokens, and {len(request.prompt_T)} were sent"
            raise BadAnswerError(told)
        if content is None:
            return RawCompletion(tokens=None, logprobs=None, finish_reason=reason)
        tokens = [entry["id"] for entry in content]
        logprobs = [entry["logprob"] for entry in content]
        tops = (
            {f"token_id:{top['id']}": float(top["logprob"]) for top in content[0]["top_logprobs"]}
            if request.top
            else None
        )
        # The server stops only at the end tokens in the model's files, perhaps fewer than the policy's. A cut at the
        # first of the policy's gives the same completion as a stop there.
        length = next((index + 1 for index, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
        is_stopped = length < len(tokens) or reason == "tool_calls"  # a stop after a tool call
        return RawCompletion(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            finish_reason="stop" if is_stopped else reason,
            tops=tops,
        )

    def load_adapter(self, name: str, folder: Path) -> HttpRequest:
        """Request one token; that makes the server read the adapter."""
        converted = folder / CONVERTED
        if not converted.exists():
            convert(folder, converted)
        self._adapters[name] = converted
        return "/v1/completions", self._model(name) | {"prompt": "0", "max_tokens": 1}

    def unload_adapter(self, name: str) -> HttpRequest:
        """Remove the files; the server drops an adapter when it reads the next one."""
        converted = self._adapters.pop(name, None)
        if converted is not None:
            shutil.rmtree(converted, ignore_errors=True)
        return self.models()

    def _model(self, adapter: str) -> dict[str, Any]:
        """Return the fields that name the model; no draft model, because with one the server stops batching."""
        path = str(self._adapters[adapter]) if adapter else None
        return {"model": self._model_path, "adapters": path, "draft_model": None}

    def _text(self, prompt_T: list[int]) -> str:
        """Return the text that the tokenizer encodes to exactly this prompt, with the special tokens it adds itself."""
        # The second without the token that the tokenizer prepends by itself.
        for ids in (prompt_T, prompt_T[1:]):
            text = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if text and self._tokenizer(text)["input_ids"] == prompt_T:
                return text
        what = f"MLX-LM takes only text, and the text of a prompt of {len(prompt_T)} tokens encodes to other tokens"
        fix = 'use an engine that takes token ids: "pytorch" or "vllm"'
        raise BackendError(Problem(code="engine.prompt-not-text", where="[inference] engine", what=what, fix=fix))


def convert(source: Path, folder: Path) -> None:
    try:
        config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
        weights, modules = dict[str, np.ndarray](), set[str]()
        deserialize: Any = safetensors.deserialize  # untyped
        for name, info in deserialize((source / "adapter_model.safetensors").read_bytes()):
            if info["dtype"] not in DTYPES:
                raise ValueError(f"{name!r} has the type {info['dtype']}")
            array = np.frombuffer(info["data"], dtype=DTYPES[info["dtype"]]).reshape(info["shape"])
            if info["dtype"] == "BF16":
                # A bfloat16, which numpy lacks, is the upper half of a float32.
                array = (array.astype(np.uint32) << 16).view(np.float32)
            module, side = _split(name)
            modules.add(module)
            weights[f"{module}.lora_{side.lower()}"] = np.ascontiguousarray(array.T)
        document = _config(config, modules)
    except (*UNREADABLE, OSError, safetensors.SafetensorError) as error:
        what = f"the adapter cannot be converted for MLX: {error}"
        fix = 'use engine = "pytorch" or "vllm"'
        raise BackendError(Problem(code="engine.unknown-adapter", where=str(source), what=what, fix=fix)) from error
    try:
        folder.mkdir()
        save_file(weights, folder / "adapters.safetensors", metadata={"format": "mlx"})
        (folder / "adapter_config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        what = f"the adapter for MLX cannot be written: {error.strerror or error}"
        fix = "free space there, or set [inference] adapter_dir"
        raise BackendError(Problem(code="engine.adapter-not-written", where=str(folder), what=what, fix=fix)) from error


def _split(name: str) -> tuple[str, str]:
    found = NAME.fullmatch(name.removeprefix(PREFIX))
    if found is None:
        raise ValueError(f"MLX-LM does not support its {name!r}")
    return found["module"], found["side"]


def _config(config: dict[str, Any], modules: set[str]) -> dict[str, Any]:
    for key, unused in UNUSED.items():
        if config.get(key) not in unused:
            raise ValueError(f"MLX-LM does not support its {key} = {config[key]!r}")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return {
        "fine_tune_type": "lora",
        "num_layers": ALL_LAYERS,  # layers that the adapter lacks keep B = 0
        "lora_parameters": {
            "rank": rank,
            "scale": alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
            "dropout": 0.0,
            "keys": sorted({LAYER.sub("", module, count=1) for module in modules}),  # the same in each layer
        },
    }
