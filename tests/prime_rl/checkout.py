"""Loads a checkout of PRIME-RL on a machine without CUDA: its code runs as it stands, what it lacks is stubbed.

Entry points, for tests marked `server` that are run by `RETRAIN_PRIME_RL=DIR nox -s prime-rl`:

- `NEEDS_CHECKOUT`: beside `pytest.mark.server` in `pytestmark`, skips a module where the variable is not set;
- `load()`: makes `prime_rl` importable, once per process, and returns the checkout's folder;
- `theirs("prime_rl.configs.trainer")`: a module of the checkout, after `load()`.

Nothing of PRIME-RL is copied into this repository. Stubs are made when the import of a library that is not installed
fails; a stub does nothing but be imported, so whatever needs the library itself fails where it is used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "RETRAIN_PRIME_RL"
NEEDS_CHECKOUT = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout of PRIME-RL")
SOURCES = ("src", "packages/prime-rl-configs/src")
# What its modules import and a CPU does not need, or what only checks types.
STUBBED = """
    beartype jaxtyping loguru orjson psutil setproctitle tenacity pyarrow prometheus_client pynvml wandb
    wandb_workspaces wandb_gql prime_cli renderers verifiers torchao torchtitan torchdata dion triton tilelang fla
    flash_attn flash_attn_interface ring_flash_attn mamba_ssm deep_gemm deep_ep quack prime_kernels nixl nixl_cu12
    nixl_cu13 modelexpress grpc vllm
"""


class _Nothing(type):
    """The class of stubs: it can be called, subscripted, decorated with, and asked for any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(name)

    def __getitem__(cls, item: Any) -> Any:
        return Any


def _stub(name: str) -> Any:
    def new(cls: type, *arguments: Any, **options: Any) -> Any:
        """A decorator, with or without arguments, leaves the function as it is."""
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return object.__new__(cls) if not options else (lambda function: function)

    return _Nothing(name, (), {"__new__": new, "__init__": lambda self, *a, **o: None})


class _StubModule(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub(name)
        setattr(self, name, made)
        return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: it is asked only for what is not installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED.split():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def load() -> Path:
    """Make the checkout importable as `prime_rl`; its folder. Idempotent."""
    folder = Path(os.environ[VARIABLE]).resolve()
    paths = [str(folder / source) for source in SOURCES]
    if paths[0] not in sys.path:
        assert (folder / SOURCES[0] / "prime_rl").is_dir(), f"{VARIABLE}={folder} is no checkout of PRIME-RL"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its small functions are compiled where they are defined
        sys.path.extend(paths)
        sys.meta_path.append(_Stubs())
    return folder


def theirs(name: str, *before: str) -> Any:
    """A module of the checkout; `before` are its names in older versions, the newest first."""
    load()
    for each in (name, *before):
        try:
            return importlib.import_module(each)
        except ModuleNotFoundError as error:
            if not each.startswith(str(error.name)):  # something that it imports
                raise
    raise ModuleNotFoundError(f"{os.environ[VARIABLE]} has no module {name}")
