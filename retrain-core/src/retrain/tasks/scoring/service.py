"""The rewards of a run at work: completions are scored while others are still being sampled."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.tasks import Reward
from retrain.kernel.errors import PluginError, Problem
from retrain.tasks.child.process import ChildError, ChildFailure
from retrain.tasks.scoring.batch import ScoringBatch, VerdictCache
from retrain.tasks.scoring.pool import ScoringPool, Task

if TYPE_CHECKING:
    from retrain.tasks.scoring.event_loop import AsyncRewards

LOG = logging.getLogger("retrain")
MOST_LOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward of a run under its name in the configuration, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float = 1.0


class ScoringService(AbstractContextManager["ScoringService"]):
    """The rewards of a run with their limits: `with service.batch() as batch`, `batch.submit(...)`, `batch.collect()`.

    Synchronous rewards run, pickled, in a pool of processes, each held to its memory and each score to its time; those
    with `async def score` in an event loop of this process. Scores do not depend on the number of workers.
    """

    def __init__(
        self, rewards: Sequence[NamedReward], settings: ScoringTable, *, shadow: ScoringService | None = None
    ) -> None:
        self.rewards = tuple(rewards)
        self.names = tuple(each.name for each in rewards)
        own = {name: table.model_dump(exclude_none=True) for name, table in settings.limits.items()}
        self.limits = tuple(settings.model_copy(update=own.get(name)) for name in self.names)
        self.shadow = shadow
        self.cache = VerdictCache() if settings.cache else None
        self.has_told_full = False  # that a folder takes no more failed scores
        self._lost_batches = 0  # in a row, in which the shadow failed on every text
        numbered = dict(enumerate(each.reward for each in rewards))
        own_loop = {n: reward for n, reward in numbered.items() if inspect.iscoroutinefunction(reward.score)}
        sync = {n: reward for n, reward in numbered.items() if n not in own_loop}
        self._memory_gb = settings.memory_gb
        self._pool = ScoringPool(sync, workers=settings.workers, memory_gb=settings.memory_gb) if sync else None
        self.asynchronous: AsyncRewards | None = None
        if own_loop:
            from retrain.tasks.scoring.event_loop import AsyncRewards

            self.asynchronous = AsyncRewards(own_loop, self.names, self.limits)
        self._is_started = False

    def launch(self) -> None:
        if self._pool is not None and not self._is_started:
            self._pool.launch()
        if self.shadow is not None:
            self.shadow.launch()

    def start(self) -> None:
        """Prepare the rewards; PluginError names a faulty one. Idempotent; the first batch calls it too."""
        if not self._is_started:
            if self.asynchronous is not None:
                self.asynchronous.prepare()
            if self._pool is not None:
                try:
                    self._pool.start()
                except ChildFailure as error:
                    raise PluginError(self._cannot_start(error)) from error
            self._is_started = True
        if self.shadow is not None:
            self.shadow.start()

    def close(self) -> None:
        self._is_started = False
        if self.asynchronous is not None:
            self.asynchronous.close()
        if self._pool is not None:
            self._pool.close()
        if self.shadow is not None:
            self.shadow.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def batch(
        self, label: str = "", failures: Path | None = None, *, fresh: bool = False, rests: bool = False
    ) -> Iterator[ScoringBatch]:
        """Open one step's scores; leaving the block cancels the outstanding ones, so that the next batch begins clean.

        With `fresh` every text is scored again, equal ones too, and only by the rewards. A batch that `rests` scores a
        single text and fails the others: so a shadow that failed on all of `MOST_LOST` batches in a row costs little.
        """
        self.start()
        rests_now = self._lost_batches >= MOST_LOST
        with nullcontext() if fresh or self.shadow is None else self.shadow.batch(rests=rests_now) as shadow:
            batch = ScoringBatch(self, label=label, failures=failures, fresh=fresh, shadow=shadow, rests=rests)
            try:
                yield batch
                if shadow is not None:
                    self._lost_batches = self._lost_batches + 1 if shadow.is_lost else 0
            finally:
                batch.cancel()

    def submit(self, task: Task) -> None:
        if self.asynchronous is not None and task.reward in self.asynchronous.rewards:
            self.asynchronous.submit(task)
            return
        assert self._pool is not None
        self._pool.submit(task)

    def drop_cancelled(self) -> None:
        if self._pool is not None:
            self._pool.drop_cancelled()
        if self.asynchronous is not None:
            self.asynchronous.drop_cancelled()

    def reward_metrics(self) -> dict[str, float]:
        return self.asynchronous.metrics() if self.asynchronous is not None else {}

    def _cannot_start(self, error: ChildFailure) -> Problem:
        names = ", ".join(
            repr(each.name) for each in self.rewards if not inspect.iscoroutinefunction(each.reward.score)
        )
        what = f"a scoring process with reward {names} could not be started: {error}"
        if isinstance(error, ChildError):
            last = error.traceback.strip().splitlines()[-3:-1]
            return Problem(where="scoring", what=what, why=" ".join(" ".join(last).split()), fix="repair the reward")
        why = f"it may use {self._memory_gb:g} GiB of memory" if self._memory_gb else ""
        return Problem(where="scoring", what=what, why=why, fix="repair the reward, or raise [scoring] memory_gb")
