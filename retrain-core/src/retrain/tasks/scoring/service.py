"""The rewards of a run at work: completions are scored while others are still being sampled."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.tasks import Reward
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.types import Example, Outcome
from retrain.tasks.child.process import ChildError, ChildFailure
from retrain.tasks.scoring.batch import ScoringBatch, VerdictCache
from retrain.tasks.scoring.pool import ScoringPool, Task, limits_of

if TYPE_CHECKING:
    from retrain.tasks.scoring.event_loop import AsyncScorers

LOG = logging.getLogger("retrain")
MOST_LOST = 3
STANDSTILL_MARGIN_S = 1.0  # an event loop on a busy machine may be that late


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward of a run under the name that the configuration gives it, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float = 1.0


class ScoringService:
    """The rewards of a run with their limits: `with service.batch() as batch`, `batch.submit(...)`, `batch.collect()`.

    Synchronous rewards are sent, pickled, to a pool of processes, each held to its memory and each score to its time;
    those with `async def score` run in an event loop of this process. One batch is open at a time, in one thread.
    Scores depend neither on the number of workers nor on which of them finishes first. `shadow` scores the same texts
    in separate processes and with a separate cache; see `ScoringBatch`.
    """

    def __init__(
        self, rewards: Sequence[NamedReward], settings: ScoringTable, *, shadow: ScoringService | None = None
    ) -> None:
        self.rewards = tuple(rewards)
        self.names = tuple(each.name for each in rewards)
        self.limits = tuple(limits_of(settings, name) for name in self.names)
        self.shadow = shadow
        self.cache = VerdictCache() if settings.cache else None
        self.has_told_full = False  # that a folder takes no more failed scores
        self._lost_batches = 0  # in a row, in which the shadow failed on every text
        numbered = dict(enumerate(each.reward for each in rewards))
        self._async = {n: reward for n, reward in numbered.items() if inspect.iscoroutinefunction(reward.score)}
        sync = {n: reward for n, reward in numbered.items() if n not in self._async}
        self._memory_gb = settings.memory_gb
        self._pool = ScoringPool(sync, workers=settings.workers, memory_gb=settings.memory_gb) if sync else None
        self._loop: AsyncScorers | None = None
        self._is_started = False

    def launch(self) -> None:
        """Start a scoring process and return at once, so that `start` takes less time; `start` reports any fault."""
        if self._pool is not None and not self._is_started:
            self._pool.launch()
        if self.shadow is not None:
            self.shadow.launch()

    def start(self) -> None:
        """Prepare the rewards; PluginError says what is wrong with one. Idempotent; the first batch does it too."""
        if not self._is_started:
            for number, reward in self._async.items():
                _prepare(self.names[number], reward)
            if self._pool is not None:
                try:
                    self._pool.start()
                except ChildFailure as error:
                    raise PluginError(self._cannot_start(error)) from error
            self._is_started = True
        if self.shadow is not None:
            self.shadow.start()

    def close(self) -> None:
        """End all processes and threads; idempotent."""
        self._is_started = False
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        if self._pool is not None:
            self._pool.close()
        if self.shadow is not None:
            self.shadow.close()

    def __enter__(self) -> ScoringService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fault(self, reward: int, pairs: Sequence[tuple[Example, str]]) -> str:
        """Why one reward, by its number, fails on the first pair, if it fails on all; empty otherwise.

        A text that takes too long ends the trial without a fault, since the next may not.
        """
        self.start()
        finished: SimpleQueue[Task] = SimpleQueue()
        first = ""
        for example, text in pairs:
            self.submit(Task(reward=reward, example=example, text=text, limits=self.limits[reward], finished=finished))
            task = finished.get()
            if task.score.outcome is not Outcome.FAILED or task.last.is_timeout:
                return ""
            first = first or task.score.detail
        return first

    @contextmanager
    def batch(
        self, label: str = "", failures: Path | None = None, *, fresh: bool = False, rests: bool = False
    ) -> Iterator[ScoringBatch]:
        """One step's scores; leaving the block cancels what is outstanding, so that the next batch begins clean.

        Scores that fail for good are written to `<failures>/<label>_<n>.json`. With `fresh` every text is scored again,
        equal ones too, and by the rewards only. One that `rests` scores a single text and fails the others, so that a
        shadow that failed on all of `MOST_LOST` batches in a row takes the time of one text until it answers again.
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
        """Hand a task to its scorer: a process, or the event loop of the asynchronous rewards."""
        if task.reward not in self._async:
            assert self._pool is not None
            self._pool.submit(task)
            return
        if self._loop is None:
            from retrain.tasks.scoring.event_loop import AsyncScorers

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
        """Where the event loop has stood still for longer than any score may take; empty while it runs."""
        if self._loop is None:
            return ""
        limit_s = max(self.limits[number].timeout_s for number in self._async) + STANDSTILL_MARGIN_S
        return (self._loop.where() or "an unknown place") if self._loop.standstill_s > limit_s else ""

    def abandon_loop(self) -> None:
        """Leave a blocked event loop to itself; the next call makes another."""
        self._loop = None

    def reward_metrics(self) -> dict[str, float]:
        """Fields of the asynchronous rewards for the step's line; a reward whose `metrics()` raises adds none."""
        fields: dict[str, float] = {}
        for number, reward in self._async.items():
            ask = getattr(reward, "metrics", dict)
            try:
                fields |= _finite(ask())
            except Exception as error:  # a plugin may raise anything, and training does not depend on its figures
                LOG.warning("metrics() of reward %r raised %s: %s", self.names[number], type(error).__name__, error)
        return fields

    def _cannot_start(self, error: ChildFailure) -> Problem:
        names = ", ".join(repr(name) for number, name in enumerate(self.names) if number not in self._async)
        what = f"a scoring process with reward {names} could not be started: {error}"
        if isinstance(error, ChildError):
            last = error.traceback.strip().splitlines()[-3:-1]
            return Problem(where="scoring", what=what, why=" ".join(" ".join(last).split()), fix="repair the reward")
        why = f"it may use {self._memory_gb:g} GiB of memory" if self._memory_gb else ""
        return Problem(where="scoring", what=what, why=why, fix="repair the reward, or raise [scoring] memory_gb")


def _prepare(name: str, reward: Any) -> None:
    if getattr(reward, "concurrency", 1) < 1:
        what = f"reward {name!r} has concurrency {reward.concurrency}"
        raise PluginError(Problem(where="scoring", what=what, fix="make it 1 or more"))
    try:
        if prepare := getattr(reward, "prepare", None):
            prepare()
    except Exception as error:
        what = f"reward {name!r} could not be prepared: {type(error).__name__}: {error}"
        raise PluginError(Problem(where="scoring", what=what, fix="repair the reward")) from error


def _finite(fields: Mapping[str, Any]) -> dict[str, float]:
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} = {value!r} is no finite number")
    return dict(fields)
