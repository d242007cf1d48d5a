"""`[model] adapter`: the trained adapter begins with the numbers of another one."""

from __future__ import annotations

import logging

from safetensors import SafetensorError
from safetensors.torch import load_file

from retrain.api import Config, ConfigError, Problem, locate_adapter
from retrain_local.model.checkpoint import ADAPTER_FILE, set_adapter
from retrain_local.model.pair import Pair
from retrain_local.options import ModelKeys

log = logging.getLogger("retrain")


def load_start(pair: Pair, config: Config, *, told: str = "Starting from the adapter in") -> None:
    """Give the adapter the numbers of `[model] adapter`, and publish them; ConfigError when they do not fit.

    `told` is how the console's line about it begins.
    """
    file = locate_adapter(config.table("model", ModelKeys).adapter) / ADAPTER_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        what = f"{file} cannot be read: {type(error).__name__}: {error}"
        problem = Problem(where=config.place("model.adapter"), what=what, fix="give a complete adapter folder")
        raise ConfigError(problem) from error
    if misfit := set_adapter(pair, tensors):
        fix = "start from an adapter of this model that has a matrix for every linear layer except the head"
        raise ConfigError(Problem(where=config.place("model.adapter"), what=f"{file}: {misfit}", fix=fix))
    pair.trained.keep_reference()
    pair.publish()
    log.info("%s %s", told, file.parent)
