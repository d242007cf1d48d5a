"""Loads a model's tokenizer and the length of its context; the text of each token, and prompts that fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins

LOG = logging.getLogger("retrain")


def load_tokenizer(config: Config, plugins: Plugins) -> Any:
    """The model's tokenizer; ConfigError when the folder or hub id cannot be read."""
    config.refuse_lost("model.model")
    model, where = config.model.model, config.place("model.model")
    LOG.info("Loading tokenizer for %s ...", model)
    shipped = plugins.locate_model(model)
    folder = Path(shipped or model).expanduser()
    if ("/" not in model or model.startswith((".", "/", "~"))) and not folder.is_dir():
        what = f"no model folder {model!r}"
        fix = "give a folder that holds a model, a hub id such as Qwen/Qwen3-4B-Instruct-2507, or builtin:tiny"
        raise ConfigError(Problem(code="model.no-folder", where=where, what=what, fix=fix))
    options = {}
    if not folder.is_dir():
        from retrain.text.hub import hub_options  # only a model that may have to be downloaded needs it

        options = hub_options(model, where=where)

    def load() -> Any:
        return _from_transformers(shipped or model, config, options)

    tokenizer = None
    if shipped:
        from retrain.text.quick_tokenizer import quick_tokenizer

        tokenizer = quick_tokenizer(folder, load)
    tokenizer = tokenizer or load()
    LOG.info("Loading vocabulary table...")
    LOG.info("Vocabulary table: %d entries", len(tokenizer))
    return tokenizer


def _from_transformers(located: str, config: Config, options: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer  # heavy: more than a second

    try:
        return AutoTokenizer.from_pretrained(located, trust_remote_code=config.model.trust_remote_code, **options)
    except Exception as error:  # transformers raises many kinds for the same two causes
        where, reason = config.place("model.model"), " ".join(str(error).split())[:300]
        what = f"no tokenizer could be loaded from {config.model.model!r}"
        fix = "check the name and the network, or give a local folder with tokenizer files"
        raise ConfigError(Problem(code="model.no-tokenizer", where=where, what=what, why=reason, fix=fix)) from error


# Tokens decoded again with each new one. A character has at most 4 bytes, so it spans at most 4 tokens of bytes.
CONTEXT = 6
BROKEN = "�"


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """One text per token; they join to the completion. A character split over tokens belongs to the last of them."""
    texts: list[str] = []
    start = 0  # first token that is decoded again
    before = ""  # text of tokens[start : done]
    done = 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith(BROKEN) and end < len(tokens) and end - done < CONTEXT:
            texts.append("")
            continue
        texts.append(text[len(before) :] if text.startswith(before) else text)
        done = end
        # Decoding from the first token each time would take quadratic time.
        if done - start > CONTEXT:
            start = done - CONTEXT // 2
        before = tokenizer.decode(tokens[start:done], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts


# One text model, without a nested configuration.
PLAIN_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def context_length(config: Config, plugins: Plugins) -> int | None:
    """Length of the model's context in tokens, prompt and answer together; None when its configuration lacks it.

    `max_position_embeddings` of the located folder or hub id; of the text part if a model has several.
    """
    model = config.model.model
    located = plugins.locate_model(model) or model
    folder = Path(located).expanduser()
    if (length := _plain_length(folder / "config.json")) is not None:
        return length
    from transformers import AutoConfig  # heavy

    from retrain.text.hub import hub_options

    source = str(folder) if folder.is_dir() else located
    try:
        options = {} if folder.is_dir() else hub_options(located, where="")
        found = AutoConfig.from_pretrained(source, trust_remote_code=config.model.trust_remote_code, **options)
        limit = getattr(found.get_text_config(), "max_position_embeddings", None)
    except Exception:  # unknown architecture, no configuration file, no network: the backend will report the problem
        return None
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None


def _plain_length(path: Path) -> int | None:
    """The length in the file if its architecture uses it unchanged; None leaves the question to `transformers`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_plain = content["model_type"] in PLAIN_ARCHITECTURES and "auto_map" not in content
        limit = content["max_position_embeddings"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return limit if is_plain and type(limit) is int and limit > 0 else None


def fit_context(
    lengths: Sequence[int], config: Config, context_length: int | None
) -> tuple[list[int], tuple[str, ...]]:
    """Indices of the prompts that fit, and notes on the others and on those with little room.

    A prompt needs at least one token, and must leave room for one. A prompt that leaves less than `max_tokens` is kept,
    although its answers may end early. ConfigError when no prompt fits.
    """
    model = config.model.model
    kept = [i for i, n in enumerate(lengths) if n > 0 and (context_length is None or n < context_length)]
    empty, long = lengths.count(0), [n for n in lengths if context_length is not None and n >= context_length]
    notes = [f"{empty} prompts without a token left out"] if empty else []
    if context_length is not None and long:
        notes.append(
            f"{len(long)} prompts of more than {context_length - 1} tokens left out, the longest of {max(long)} "
            f"(context of {model}: {context_length})"
        )
    if lengths and not kept:
        where, what, why = config.place("data.source"), "every prompt was left out", "; ".join(notes)
        fix = "use shorter prompts ([data] system_prompt and instruction count too), or a model with a longer context"
        raise ConfigError(Problem(code="data.no-usable-prompt", where=where, what=what, why=why, fix=fix))
    wanted = config.training.max_tokens
    rooms = [context_length - lengths[i] for i in kept] if context_length is not None else []
    if tight := [room for room in rooms if room < wanted]:
        notes.append(
            f"{len(tight)} of {len(kept)} prompts leave less room than max_tokens = {wanted}: "
            f"{min(tight)} tokens at least (context of {model}: {context_length})"
        )
    return kept, tuple(notes)
