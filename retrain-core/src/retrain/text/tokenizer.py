"""Loads the tokenizer of a model, without `transformers` where the result is exactly the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins

LOG = logging.getLogger("retrain")


def load_tokenizer(config: Config, plugins: Plugins) -> Any:
    """The model's tokenizer; ConfigError when the folder or hub id cannot be read."""
    config.refuse_lost("model.model")
    model = config.model.model
    LOG.info("Loading tokenizer for %s ...", model)
    shipped = plugins.locate_model(model)
    folder = Path(shipped or model).expanduser()
    if ("/" not in model or model.startswith((".", "/", "~"))) and not folder.is_dir():
        fix = "give a folder that holds a model, a hub id such as Qwen/Qwen3-4B-Instruct-2507, or builtin:tiny"
        raise ConfigError(Problem(where=config.place("model.model"), what=f"no model folder {model!r}", fix=fix))
    options = {}
    if not folder.is_dir():
        from retrain.text.hub import hub_options  # only a model that may have to be downloaded needs it

        options = hub_options(model, where=config.place("model.model"))

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
        reason = " ".join(str(error).split())[:300]
        fix = "check the name and the network, or give a local folder with tokenizer files"
        what = f"no tokenizer could be loaded from {config.model.model!r}"
        raise ConfigError(Problem(where=config.place("model.model"), what=what, why=reason, fix=fix)) from error
