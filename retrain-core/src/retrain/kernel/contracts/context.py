"""Input of a part's factory, and the progress that a part reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from retrain.kernel.config.resolved import Config
    from retrain.kernel.errors import RetrainError
    from retrain.kernel.registry import Plugins
    from retrain.kernel.seeding import Seeds


def _never_stop() -> None:
    """Outside a run there is nothing to check."""


def _raise(error: RetrainError) -> None:
    raise error


class PhaseProgress:
    """Progress of the sampling or training under way. Only for display: nothing recorded may depend on it.

    `done` of `total` `unit`s (completions, packs) are finished, with `tokens` in them; each may get `limit` tokens, 0 =
    unknown. `drawn` are the tokens sampled so far, in unfinished completions too.
    """

    def __init__(self) -> None:
        # Engines count from several threads, and `+=` on an attribute is not atomic.
        self._lock = Lock()
        self.begin("", 0)

    def begin(self, unit: str, total: int, *, limit: int = 0) -> None:
        """Count from zero; the run does so for sampling, and a backend for its training."""
        with self._lock:
            self.unit, self.total, self.limit, self.started = unit, total, limit, time.monotonic()
            self.done = self.tokens = self.drawn = 0

    def add(self, done: int = 0, *, tokens: int = 0, drawn: int = 0) -> None:
        """Add progress since the last call; from any thread, a few times a second, never per token."""
        with self._lock:
            self.done, self.tokens, self.drawn = self.done + done, self.tokens + tokens, self.drawn + drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """Input of a factory: the resolved config, its own validated parameters, the seeds, other plugins.

    `tokenizer` is a `transformers` tokenizer, present for every kind except data sources and config tables.
    `check_stop()` raises if a stop was requested: long work inside `Backend.train` is shielded from signals, so it
    calls this where nothing has changed yet (between micro-batches, never after the optimizer has stepped).
    `fail_run(error)`, for watchers, ends the run with that error from any thread, after saving a checkpoint.
    `sampling_progress` and `training_progress`: an engine may `add(drawn=...)` to the first, a backend counts its packs
    in the second, and watchers read both. Parts that report nothing work, too.
    """

    config: Config
    seeds: Seeds
    plugins: Plugins
    params: BaseModel | None = None
    tokenizer: Any = None
    check_stop: Callable[[], None] = _never_stop
    fail_run: Callable[[RetrainError], None] = _raise
    sampling_progress: PhaseProgress = field(default_factory=PhaseProgress)
    training_progress: PhaseProgress = field(default_factory=PhaseProgress)
