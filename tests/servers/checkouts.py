"""Modules of other trainers' checkouts, imported as they stand on a machine without most of what they import."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def needs(variable: str) -> pytest.MarkDecorator:
    """Skip a test where the variable names no checkout."""
    return pytest.mark.skipif(variable not in os.environ, reason=f"{variable} names no checkout")


class Nothing:
    """In place of a class, a function or a decorator that does not matter for a loss."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if given else None

    def __enter__(self) -> None: ...

    def __exit__(self, *given: object) -> None: ...


class Placeholder(ModuleType):
    """A module that is imported for the types in signatures, logs or statistics."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


@contextmanager
def importable(variable: str, packages: Sequence[str], placeholders: Sequence[str]) -> Iterator[None]:
    """Let modules of a checkout be imported: `packages` without their __init__, `placeholders` not at all."""
    root, before = Path(os.environ[variable]), dict(sys.modules)
    for name in packages:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules.update({name: Placeholder(name) for name in placeholders})
    try:
        yield
    finally:
        own = {name.partition(".")[0] for name in (*packages, *placeholders)}
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in own:
                del sys.modules[name]
        sys.modules.update(before)


class ActorConfig(SimpleNamespace):
    """What losses read of verl's configuration; the second clip, which is always on there, is out of reach."""

    def __init__(self, *, loss_scale_factor: int | None = None, **settings: Any) -> None:
        scale = {} if loss_scale_factor is None else {"loss_scale_factor": loss_scale_factor}
        clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}
        super().__init__(**({"policy_loss": None} | clips | settings), global_batch_info=scale)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@contextmanager
def verl_modules(variable: str = "RETRAIN_VERL") -> Iterator[SimpleNamespace]:
    """Yield the modules with losses and advantages, weights against the sampler, and learning rates, of verl or a fork.

    Modules that a fork lacks are left out.
    """
    types = ("trainer.config", "trainer.config.algorithm", "workers.config", "workers.config.actor", "workers")
    placeholders = [*(f"verl.{name}" for name in (*types, "protocol")), "omegaconf", "tensordict"]
    with importable(variable, ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo"), placeholders):
        vars(sys.modules["verl.workers.config"])["ActorConfig"] = ActorConfig
        found = SimpleNamespace()
        if groups := _module("verl.utils.groupwise"):
            names = ("as_torch_index", "group_mean_std")
            vars(sys.modules["verl.utils"]).update({name: getattr(groups, name) for name in names})
        found.core = importlib.import_module("verl.trainer.ppo.core_algos")
        found.mismatch = _module("verl.trainer.ppo.rollout_corr_helper")
        found.rates = importlib.import_module("verl.utils.torch_functional")
        yield found


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
