"""Sends each task to its scorer: a process that can be killed, or the event loop of the asynchronous rewards."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.verifier import Reward
from retrain.kernel.errors import PluginError, Problem
from retrain.tasks.child.process import ChildError, ChildFailure
from retrain.tasks.scoring.event_loop import AsyncScorers
from retrain.tasks.scoring.pool import ScoringPool
from retrain.tasks.scoring.task import Limits, Task, limits_of

LOG = logging.getLogger("retrain")
STANDSTILL_MARGIN_S = 1.0  # an event loop on a busy machine may be that late


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward of a run under the name that the configuration gives it, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float = 1.0


class Dispatcher:
    """The rewards of a run, numbered, with their limits and whatever runs them.

    Synchronous rewards are sent, pickled, to a pool of processes, each held to its memory and each score to its time;
    those with `async def score` run in an event loop of this process. Submitting is for one thread.
    """

    def __init__(self, rewards: Sequence[NamedReward], settings: ScoringTable) -> None:
        self.rewards = tuple(rewards)
        self.limits: tuple[Limits, ...] = tuple(limits_of(settings, each.name) for each in rewards)
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

    def start(self) -> None:
        """Prepare the rewards; PluginError says what is wrong with one. Safe to call twice."""
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
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        if self._pool is not None:
            self._pool.close()

    def submit(self, task: Task) -> None:
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
            name, ask = self.rewards[number].name, getattr(reward, "metrics", None)
            if ask is None:
                continue
            try:
                fields |= _finite(ask())
            except Exception as error:  # a plugin may raise anything, and training does not depend on its figures
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
        why = f"it may use {self._memory_gb:g} GiB of memory" if self._memory_gb else ""
        return Problem(where="scoring", what=what, why=why, fix="repair the reward, or raise [scoring] memory_gb")


def _finite(fields: Mapping[str, Any]) -> dict[str, float]:
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} = {value!r} is no finite number")
    return dict(fields)
