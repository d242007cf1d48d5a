"""verl's own functions, from a checkout that RETRAIN_VERL names; what they import only for types is left out."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

VARIABLE = "RETRAIN_VERL"
CONFIGURED = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}


class ActorConfig(SimpleNamespace):
    """What the losses read of verl's configuration."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Placeholder(ModuleType):
    """A module that is imported for the types in signatures."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ActorConfig if name == "ActorConfig" else type(name, (), {})


def actor_config(*, loss_scale_factor: int | None = None, policy_loss: Any = None, **settings: Any) -> ActorConfig:
    """Settings of an actor; the second clip, which verl has always on, is out of reach unless it is set."""
    scale = {} if loss_scale_factor is None else {"loss_scale_factor": loss_scale_factor}
    return ActorConfig(**(CONFIGURED | settings), policy_loss=policy_loss, global_batch_info=scale)


@contextmanager
def loaded() -> Iterator[SimpleNamespace]:
    """The modules with losses and advantages, weights against the sampler, and learning rates."""
    before = dict(sys.modules)
    root = Path(os.environ[VARIABLE]) / "verl"
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo"):  # without running their __init__
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    types = ("verl.trainer.config", "verl.trainer.config.algorithm", "verl.workers.config", "verl.workers.config.actor")
    for name in (*types, "verl.workers", "verl.protocol", "omegaconf", "tensordict"):
        sys.modules[name] = Placeholder(name)
    try:
        groups = importlib.import_module("verl.utils.groupwise")
        vars(sys.modules["verl.utils"]).update(
            as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std
        )
        yield SimpleNamespace(
            core=importlib.import_module("verl.trainer.ppo.core_algos"),
            mismatch=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
            rates=importlib.import_module("verl.utils.torch_functional"),
        )
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("verl", "omegaconf", "tensordict"):
                del sys.modules[name]
        sys.modules.update(before)
