"""What the factory of a part receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from retrain.kernel.config.resolved import Config
    from retrain.kernel.errors import RetrainError
    from retrain.kernel.plugins.manager import Plugins
    from retrain.kernel.seeding import Seeds


def _never_stop() -> None:
    """Outside a run there is no stop to check for."""


def _raise(error: RetrainError) -> None:
    """Outside a run an error is raised where it occurs."""
    raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """What a factory receives: the resolved config, its own validated parameters, the seeds, other plugins.

    `tokenizer` is a `transformers` tokenizer, present for every kind except data sources and config tables.
    `check_stop()` raises if a stop was requested: long work inside `Backend.train`, which is shielded from signals,
    calls it where nothing has changed yet (between micro-batches, never after the optimizer has stepped).
    `fail_run(error)`, for watchers, ends the run with that error from any thread, after saving a checkpoint.
    """

    config: Config
    seeds: Seeds
    plugins: Plugins
    params: BaseModel | None = None
    tokenizer: Any = None
    check_stop: Callable[[], None] = _never_stop
    fail_run: Callable[[RetrainError], None] = _raise
