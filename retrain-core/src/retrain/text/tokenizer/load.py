"""Loads the tokenizer of a model, without `transformers` where the result is exactly the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.hub import hub_options
from retrain.text.tokenizer.folder import plain_parts
from retrain.text.tokenizer.quick import QuickTokenizer

LOG = logging.getLogger("retrain")


def load_tokenizer(config: Config, plugins: Plugins) -> Any:
    """The model's tokenizer; ConfigError when the folder or hub id cannot be read."""
    config.refuse_lost("model.model")
    model = config.model.model
    LOG.info("Loading tokenizer for %s ...", model)
    located = plugins.locate_model(model) or model
    folder = Path(located).expanduser()
    if ("/" not in located or located.startswith((".", "/", "~"))) and not folder.is_dir():
        fix = "give a folder that holds a model, a hub id such as Qwen/Qwen3-4B-Instruct-2507, or builtin:tiny"
        raise ConfigError(Problem(where=config.place("model.model"), what=f"no model folder {located!r}", fix=fix))

    options = {} if folder.is_dir() else hub_options(located, where=config.place("model.model"))

    def load() -> Any:
        return _from_transformers(located, config, options)

    parts = plain_parts(folder) if folder.is_dir() else None
    tokenizer = load() if parts is None else QuickTokenizer(parts, load)
    LOG.info("Loading vocabulary table...")
    LOG.info("Vocabulary table: %d entries", len(tokenizer))
    return tokenizer


def _from_transformers(located: str, config: Config, options: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer  # heavy: more than a second

    try:
        return AutoTokenizer.from_pretrained(located, trust_remote_code=config.model.trust_remote_code, **options)
    except Exception as error:  # transformers raises many kinds for the same two causes
        reason = " ".join(str(error).split())[:300]
        fix = "check the name and the network, or give a local folder with tokenizer files"
        what = f"no tokenizer could be loaded from {config.model.model!r}"
        raise ConfigError(Problem(where=config.place("model.model"), what=what, why=reason, fix=fix)) from error
