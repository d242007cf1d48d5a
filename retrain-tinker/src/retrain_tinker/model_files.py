"""Reads from a base model's files which ids end a completion and how long a row may be; never its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def stop_ids(located: str, tokenizer: Any) -> frozenset[int]:
    """Every end-of-sequence id of the model's generation config, and the tokenizer's."""
    configured = _document(located, "generation_config.json").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(id_) for id_ in [*ids, getattr(tokenizer, "eos_token_id", None)] if isinstance(id_, int))


def context_limit(located: str) -> int | None:
    """Longest row, prompt and completion together; None if the model's config does not say."""
    document = _document(located, "config.json")
    text = document.get("text_config")
    limit = (text if isinstance(text, dict) else document).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def _document(located: str, name: str) -> Mapping[str, Any]:
    """A JSON file of a folder or of a model on the hub; empty if it does not exist."""
    folder = Path(located).expanduser()
    try:
        if folder.is_dir():
            path = folder / name
        else:
            from huggingface_hub import hf_hub_download, try_to_load_from_cache

            cached = try_to_load_from_cache(located, name)  # first, so that a missing network costs nothing
            path = Path(cached if isinstance(cached, str) else hf_hub_download(located, name))
        found = json.loads(path.read_text(encoding="utf-8"))
    except Exception:  # the hub's client raises many types; the tokenizer's own id and no limit are fine
        return {}
    return found if isinstance(found, dict) else {}
