"""Rewards with `async def score`: one event loop in a thread of the run, at most `concurrency` calls of each at a time.

A call is cancelled at its time limit and not awaited, since it may ignore the cancellation. A reward that blocks the
loop instead of awaiting cannot be cancelled; a heartbeat that stops shows it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.types import Score
from retrain.tasks.child.worker import failure
from retrain.tasks.scoring.pool import Attempt, Task
from retrain.tasks.scoring.verdict import verdict

LOG = logging.getLogger("retrain")
CONCURRENCY = 16
# A heartbeat may be this late on a busy machine.
STANDSTILL_MARGIN_S = 1.0
BEAT_S = 0.2
JOIN_S = 2.0
STRAY = Attempt(score=Score.failed("the reward cancelled its own call"))


class AsyncRewards:
    """The asynchronous rewards of a run by number, and the event loop that their first score opens."""

    def __init__(self, rewards: Mapping[int, Any], names: Sequence[str], limits: Sequence[ScoringTable]) -> None:
        self.rewards, self._names = rewards, names
        self._standstill_s = max(limits[number].timeout_s for number in rewards) + STANDSTILL_MARGIN_S
        self._loop: AsyncScorers | None = None

    def prepare(self) -> None:
        for number, reward in self.rewards.items():
            name = self._names[number]
            if getattr(reward, "concurrency", 1) < 1:
                what, fix = f"reward {name!r} has concurrency {reward.concurrency}", "make it 1 or more"
                raise PluginError(Problem(code="reward.bad-concurrency", where="scoring", what=what, fix=fix))
            try:
                if prepare := getattr(reward, "prepare", None):
                    prepare()
            except Exception as error:
                what = f"reward {name!r} could not be prepared: {type(error).__name__}: {error}"
                fix = "repair the reward"
                raise PluginError(Problem(code="reward.cannot-prepare", where="scoring", what=what, fix=fix)) from error

    def submit(self, task: Task) -> None:
        if self._loop is None:
            self._loop = AsyncScorers(self.rewards)
        self._loop.submit(task)

    def drop_cancelled(self) -> None:
        if self._loop is not None:
            self._loop.drop_cancelled()

    def blocked_at(self) -> str:
        """Return where the event loop has been blocked for longer than any score may take; empty while it runs."""
        if self._loop is None or time.monotonic() - self._loop.beat - BEAT_S <= self._standstill_s:
            return ""
        return self._loop.where() or "an unknown place"

    def give_up(self, outstanding: set[Task], where: str) -> Problem:
        """Fail the scores in a blocked event loop. Its thread cannot be ended, so the next score opens another loop."""
        for task in [task for task in outstanding if task.reward in self.rewards]:
            task.is_cancelled = True
            task.last = Attempt(score=Score.failed(f"the event loop is blocked at {where}"), is_timeout=True)
            outstanding.discard(task)
        self._loop = None
        names = ", ".join(repr(self._names[number]) for number in self.rewards)
        what = f"an `async def score` ({names}) blocks instead of awaiting, at {where}"
        fix = "await there, or make it a plain `def score`: its process can be killed"
        why = "it cannot be cancelled at its time limit"
        return Problem(code="reward.blocks-loop", where="scoring", what=what, why=why, fix=fix)

    def metrics(self) -> dict[str, float]:
        """Return the rewards' own fields for the step's line; a reward whose `metrics()` raises adds none."""
        fields: dict[str, float] = {}
        for number, reward in self.rewards.items():
            try:
                found = dict(getattr(reward, "metrics", dict)())
                for name, value in found.items():
                    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                        raise ValueError(f"{name} = {value!r} is no finite number")
                fields |= found
            # A plugin may raise anything, and training does not depend on its figures.
            except Exception as error:
                text = "metrics() of reward %r raised %s: %s"
                LOG.warning(text, self._names[number], type(error).__name__, error)
        return fields

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


class AsyncScorers:
    def __init__(self, rewards: Mapping[int, Any]) -> None:
        self._rewards = dict(rewards)
        self._loop = asyncio.new_event_loop()
        self._slots = {n: asyncio.Semaphore(getattr(r, "concurrency", CONCURRENCY)) for n, r in rewards.items()}
        self._calls: dict[Task, asyncio.Task[None]] = {}
        self.beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="async-scoring", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._soon(self._begin, task)

    def drop_cancelled(self) -> None:
        self._soon(self._cancel)

    def where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        places = [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)]
        own = ("/asyncio/", "/threading.py", __file__)
        theirs = [place for place in places if not any(part in place for part in own)]
        return (theirs or places)[0]

    def close(self) -> None:
        """Cancel all calls and end the thread; a blocked thread is left behind and ends with the process."""
        self._soon(self._stop)
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        if not self._thread.is_alive() and not self._loop.is_running():
            self._loop.close()

    def _soon(self, work: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._pulse()
        self._loop.run_forever()
        rest = asyncio.all_tasks(self._loop)
        for each in rest:
            each.cancel()
        if rest:
            with suppress(RuntimeError):
                self._loop.run_until_complete(asyncio.wait(rest, timeout=JOIN_S / 2))

    def _pulse(self) -> None:
        self.beat = time.monotonic()
        # A timer, since a reward may cancel every task of the loop.
        self._loop.call_later(BEAT_S, self._pulse)

    def _begin(self, task: Task) -> None:
        if task.is_cancelled:
            return
        call = self._loop.create_task(self._score(task))
        self._calls[task] = call
        call.add_done_callback(lambda done: self._end(task, done))

    def _end(self, task: Task, call: asyncio.Task[None]) -> None:
        self._calls.pop(task, None)
        if not task.is_cancelled and (call.cancelled() or call.exception() is not None):
            # User code cancelled our call. Use up the retries, or the batch would wait for ever.
            while not task.settle(STRAY):
                pass

    def _cancel(self) -> None:
        for task, call in list(self._calls.items()):
            if task.is_cancelled:
                call.cancel()

    def _stop(self) -> None:
        for call in list(self._calls.values()):
            call.cancel()
        self._loop.stop()

    async def _score(self, task: Task) -> None:
        is_final = False
        while not is_final:
            # Waiting for a slot does not count towards the time limit of the call.
            async with self._slots[task.reward]:
                attempt = await self._attempt(task)
            is_final = task.settle(attempt)

    async def _attempt(self, task: Task) -> Attempt:
        started = time.perf_counter()
        limit_s = task.limits.timeout_s
        call = self._loop.create_task(_guarded(self._rewards[task.reward], task))
        try:
            await asyncio.wait({call}, timeout=limit_s)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not call.done():
            call.cancel()
            return Attempt(score=Score.failed(f"timed out after {limit_s:g} s"), seconds=limit_s, is_timeout=True)
        if call.cancelled():
            return STRAY
        score, report = call.result()
        return Attempt(score=score, seconds=time.perf_counter() - started, report=report)


async def _guarded(reward: Any, task: Task) -> tuple[Score, str]:
    """Return the verdict, and the traceback of an exception. `sys.exit` in user code must not end the loop."""
    try:
        return verdict(await reward.score(task.example, task.text)), ""
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        report = failure(error)
        return Score.failed(f"{report['error']}: {report['text']}{report['place']}"), report["traceback"]
