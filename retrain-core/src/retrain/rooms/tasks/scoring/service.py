"""Scores the completions of a run: in processes that can be killed, while others are still being sampled."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.tasks import Reward
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.types import Score
from retrain.rooms.tasks.child.errors import ChildError, ChildFailure
from retrain.rooms.tasks.scoring.batch import ScoringBatch
from retrain.rooms.tasks.scoring.cache import Key, VerdictCache
from retrain.rooms.tasks.scoring.event_loop import AsyncScorers
from retrain.rooms.tasks.scoring.failures import MAX_FILES, FailureRecord, write_failures
from retrain.rooms.tasks.scoring.pool import ScoringPool
from retrain.rooms.tasks.scoring.task import Limits, Task, limits_of

LOG = logging.getLogger("retrain")
STANDSTILL_MARGIN_S = 1.0  # an event loop on a busy machine may be that late


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward of a run under the name that the configuration gives it, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float = 1.0


class ScoringService:
    """The rewards of a run at work: `with service.batch() as batch`, `batch.submit(...)`, `batch.collect()`.

    Synchronous rewards are sent, pickled, to a pool of processes, each held to its memory and each score to its time;
    those with `async def score` run in an event loop of this process. Batches come one after the other; submitting is
    for one thread. What the scores are depends neither on the number of workers nor on who finishes first.
    """

    def __init__(self, rewards: Sequence[NamedReward], settings: ScoringTable) -> None:
        self.rewards = tuple(rewards)
        self.settings = settings
        self.limits: tuple[Limits, ...] = tuple(limits_of(settings, each.name) for each in rewards)
        numbered = dict(enumerate(each.reward for each in rewards))
        self._async = {n: reward for n, reward in numbered.items() if inspect.iscoroutinefunction(reward.score)}
        sync = {n: reward for n, reward in numbered.items() if n not in self._async}
        self._pool = ScoringPool(sync, workers=settings.workers, memory_gb=settings.memory_gb) if sync else None
        self._loop: AsyncScorers | None = None
        self._cache = VerdictCache() if settings.cache else None
        self._is_started = False
        self._has_told_full = False

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards, as the configuration names them."""
        return tuple(each.name for each in self.rewards)

    def launch(self) -> None:
        """Let a scoring process come up meanwhile, so that `start` takes less time; what is wrong is told there."""
        if self._pool is not None and not self._is_started:
            self._pool.launch()

    def start(self) -> None:
        """Prepare the rewards; PluginError says what is wrong with one. The first batch does it otherwise."""
        if self._is_started:
            return
        for number, reward in self._async.items():
            self._prepare(self.rewards[number].name, reward)
        if self._pool is not None:
            try:
                self._pool.start()
            except ChildFailure as error:
                raise PluginError(self._cannot_start(error)) from error
        self._is_started = True

    def close(self) -> None:
        """End all processes and threads; safe to call twice."""
        self._is_started = False
        self._end_loop()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> ScoringService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def batch(self, label: str = "", failures: Path | None = None, *, fresh: bool = False) -> Iterator[ScoringBatch]:
        """One step's scores; leaving the block cancels what is outstanding, so that the next batch begins clean.

        Scores that fail for good are written to `<failures>/<label>_<n>.json`. With `fresh` every text is scored anew,
        equal ones too.
        """
        self.start()
        batch = ScoringBatch(self, label=label, failures=failures, shares=not fresh and self._cache is not None)
        try:
            yield batch
        finally:
            batch.cancel()

    def dispatch(self, task: Task) -> None:
        """Hand a task to its scorer."""
        if task.reward not in self._async:
            assert self._pool is not None
            self._pool.submit(task)
            return
        if self._loop is None:
            self._loop = AsyncScorers(self._async)
            self._loop.start()
        self._loop.submit(task)

    def drop_cancelled(self) -> None:
        """End whatever works on a cancelled task."""
        if self._pool is not None:
            self._pool.drop_cancelled()
        if self._loop is not None:
            self._loop.drop_cancelled()

    def is_async(self, number: int) -> bool:
        """Whether a reward runs in the event loop."""
        return number in self._async

    def blocked_at(self) -> str:
        """Where the event loop stands still for longer than any score may take; empty while it does not."""
        if self._loop is None:
            return ""
        limit_s = max(self.limits[number].timeout_s for number in self._async) + STANDSTILL_MARGIN_S
        return (self._loop.where() or "an unknown place") if self._loop.standstill_s > limit_s else ""

    def leave_loop(self) -> None:
        """Give up a blocked event loop; the next call makes another."""
        self._loop = None

    def known(self, key: Key) -> Score | None:
        """A verdict that was given already."""
        return self._cache.get(key) if self._cache is not None else None

    def keep(self, key: Key, score: Score) -> None:
        """Remember a verdict."""
        if self._cache is not None:
            self._cache.put(key, score)

    def keep_failures(self, folder: Path, label: str, records: Sequence[FailureRecord]) -> None:
        """Write failed scores down, and say once when there is no more room."""
        if not write_failures(folder, label, records) and not self._has_told_full:
            self._has_told_full = True
            LOG.warning("%s holds %d failed scores; no more are kept", folder, MAX_FILES)

    def reward_metrics(self) -> dict[str, float]:
        """What the asynchronous rewards have for the step's line; one that raises is told and passed over."""
        fields: dict[str, float] = {}
        for number, reward in self._async.items():
            name, ask = self.rewards[number].name, getattr(reward, "metrics", None)
            if ask is None:
                continue
            try:
                fields |= _finite(ask())
            except Exception as error:  # a plugin may raise anything; its figures are no part of the training
                LOG.warning("metrics() of reward %r raised %s: %s", name, type(error).__name__, error)
        return fields

    def _prepare(self, name: str, reward: Any) -> None:
        if getattr(reward, "concurrency", 1) < 1:
            what = f"reward {name!r} has concurrency {reward.concurrency}"
            raise PluginError(Problem(where="scoring", what=what, fix="make it 1 or more"))
        prepare = getattr(reward, "prepare", None)
        try:
            if prepare is not None:
                prepare()
        except Exception as error:
            what = f"reward {name!r} could not be prepared: {type(error).__name__}: {error}"
            raise PluginError(Problem(where="scoring", what=what, fix="repair the reward")) from error

    def _cannot_start(self, error: ChildFailure) -> Problem:
        names = ", ".join(repr(each.name) for n, each in enumerate(self.rewards) if n not in self._async)
        what = f"a scoring process with reward {names} could not be started: {error}"
        if isinstance(error, ChildError):
            last = error.traceback.strip().splitlines()[-3:-1]
            return Problem(where="scoring", what=what, why=" ".join(" ".join(last).split()), fix="repair the reward")
        why = f"it may use {self.settings.memory_gb:g} GiB of memory" if self.settings.memory_gb else ""
        return Problem(where="scoring", what=what, why=why, fix="repair the reward, or raise [scoring] memory_gb")

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


def _finite(fields: Mapping[str, Any]) -> dict[str, float]:
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} = {value!r} is no finite number")
    return dict(fields)
