"""Loads the base model once, from safetensors only, and says in one message why it cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from retrain.api import BackendError, Config, ConfigError, Problem
from retrain_local.locate import KEY, Source, first_line

CACHED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
log = logging.getLogger("retrain")


def load_base(config: Config, source: Source, device: torch.device) -> Any:
    """The causal language model on its device, frozen, in evaluation mode: fp32 on the CPU, bf16 on CUDA.

    ConfigError when it cannot be loaded completely; BackendError when the device is too small for it.
    """
    where = config.place(KEY)
    log.info("Loading train model: %s on %s...", config.model.model, device)
    options = {"trust_remote_code": config.model.trust_remote_code, "local_files_only": source.offline}
    try:
        with _quiet():
            model_config = AutoConfig.from_pretrained(source.path, **options)
            _refuse_recurrent(model_config, where)
            model, report = AutoModelForCausalLM.from_pretrained(
                source.path,
                config=model_config,
                dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except ConfigError:
        raise
    except Exception as error:  # whatever the architecture's own code raises, the fault is the model that was named
        raise ConfigError(Problem(where=where, what=_refusal(config, error), fix=_fix(error))) from error
    if missing := sorted(report["missing_keys"]):
        what = f"{source.path} lacks {len(missing)} weights, first {missing[0]}; they would stay random"
        raise ConfigError(Problem(where=where, what=what, fix="use a complete checkpoint of a causal language model"))
    if model.get_output_embeddings() is None:
        what = f"{type(model).__name__} has no language-model head"
        raise ConfigError(Problem(where=where, what=what, fix="name a causal language model"))
    model.requires_grad_(False).eval()
    return _moved(model, device)


def context_limit(model: Any) -> int | None:
    """Longest row, prompt and completion together, that the model has positions for; None if it does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every end-of-sequence id of the model's generation config, and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(id_) for id_ in [*ids, getattr(tokenizer, "eos_token_id", None)] if id_ is not None)


def _refuse_recurrent(model_config: Any, where: str) -> None:
    text = model_config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - CACHED_LAYERS
    if kinds or not getattr(text, "num_attention_heads", None):
        what = f"{model_config.model_type} has {', '.join(sorted(kinds)) or 'no attention'} layers"
        why = "the pytorch engine keeps keys and values, and no other state, between tokens"
        raise ConfigError(Problem(where=where, what=what, why=why, fix="use a model with attention layers only"))


def _refusal(config: Config, error: Exception) -> str:
    return f"{config.model.model!r} cannot be loaded: {first_line(error)}"


def _fix(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "set [model] trust_remote_code = true if you trust the code that comes with this model"
    return "check that its files are complete and that this version of transformers knows its architecture"


def _moved(model: Any, device: torch.device) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        what = f"the model does not fit on {device}: {first_line(error)}"
        raise BackendError(Problem(what=what, fix="use a smaller model or a larger GPU")) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for reading a file: the console has its own line for it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
