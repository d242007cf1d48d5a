"""The backend of a configuration: built, and given other weights to sample from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, Problem, RetrainError
from retrain.kernel.plugins.build import build_part
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.run.check import backend_options


def build_backend(context: PluginContext) -> Backend:
    """The backend that the configuration names, with its options; this loads the model."""
    config = context.config
    options = backend_options(config, context.plugins)
    backend: Backend = build_part(
        Kind.BACKEND, config.backend.backend, "backend.backend", context, options, "backend.options"
    )
    return backend


def use_weights(backend: Backend, folder: Path | None, config: Config) -> None:
    """Make `backend` sample from the weights in `folder`; None = those of the base."""
    if hasattr(backend, "sample_from"):
        backend.sample_from(folder)
    elif folder is not None:
        backend.load(folder)
        backend.publish()
    else:
        what = f"backend {config.backend.backend!r} cannot return to the model that training began with"
        fix = "use --backend local, or open the base model by its name"
        raise BackendError(Problem(where=config.place("backend.backend"), what=what, fix=fix))


def import_backend(config: Config, plugins: Plugins) -> None:
    """Import the backend without building it; `build_backend` reports its faults."""
    where, paths = config.place("backend.backend"), config.plugins.search_paths
    with suppress(RetrainError):
        resolve(plugins, Kind.BACKEND, config.backend.backend, where=where, search_paths=paths)
