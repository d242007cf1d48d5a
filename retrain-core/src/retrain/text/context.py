"""How many tokens fit into the model's context, and which prompts leave room for an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins

PLAIN_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # one text model, no nested configuration


def context_length(config: Config, plugins: Plugins) -> int | None:
    """Length of the model's context in tokens, prompt and answer together; None when its configuration does not say.

    `max_position_embeddings` of the located folder or hub id, of the text part where a model has several.
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
    except Exception:  # unknown architecture, no configuration file, no network: the backend reports what it needs
        return None
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None


def _plain_length(path: Path) -> int | None:
    """The length in the file if its architecture uses that as it is; None leaves the question to `transformers`."""
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
        fix = "use shorter prompts ([data] system_prompt and instruction count too), or a model with a longer context"
        what = "no prompt can be used"
        raise ConfigError(Problem(where=config.place("data.source"), what=what, why="; ".join(notes), fix=fix))
    wanted = config.training.max_tokens
    rooms = [context_length - lengths[i] for i in kept] if context_length is not None else []
    if tight := [room for room in rooms if room < wanted]:
        notes.append(
            f"{len(tight)} of {len(kept)} prompts leave less room than max_tokens = {wanted}: "
            f"{min(tight)} tokens at least (context of {model}: {context_length})"
        )
    return kept, tuple(notes)
