"""Plays many episodes side by side in one event loop; the environment of a provider, and its settings."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

from retrain.api import (
    Action,
    ConfigError,
    EpisodeResult,
    Example,
    Observation,
    PluginContext,
    Problem,
    Table,
    install_line,
)
from retrain_rewards.environments.episode import Cleaner, Episode
from retrain_rewards.faults import refused

Result = TypeVar("Result")
# Time for a cut episode to clean up.
GRACE_S = 1.0


class EpisodeLoop:
    """An event loop in a separate thread, and the episodes in it.

    Episodes continue in the order of their numbers, and `step` returns when all of them wait, so that observations
    depend only on the actions. An episode that takes longer than `timeout_s` between two turns is cut and fails; the
    others continue. With `at_once` no more than so many are open: the next one starts when another is over. Code that
    blocks the loop can only be ended by killing the process around it. Without `max_turns` the environment decides.
    """

    def __init__(self, timeout_s: float, *, max_turns: int | None = None, at_once: int = 0) -> None:
        self.timeout_s = timeout_s
        self.max_turns = max_turns
        self.at_once = at_once
        self.episodes: list[Episode] = []
        self._play: Callable[[Episode], Awaitable[None]] | None = None
        self._loop = asyncio.new_event_loop()
        # Before any episode: asyncio makes a plain one at the first call otherwise.
        self._loop.set_default_executor(_Executor())
        self._changed = asyncio.Event()
        self._score_until = 0.0
        # A daemon, since code of an environment may block the loop for ever.
        threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def reset(self, examples: Sequence[Example], play: Callable[[Episode], Awaitable[None]]) -> dict[int, Observation]:
        """Drop the open episodes, and start one per example; returns the first observations by number."""
        self.run(self._cancel(self.episodes))
        self.episodes = [
            Episode(number=number, example=example, max_turns=self.max_turns, changed=self._changed.set)
            for number, example in enumerate(examples)
        ]
        self._play = play
        return self.step({})

    def step(self, actions: Mapping[int, Action]) -> dict[int, Observation]:
        return self.run(self._step(actions))

    def close(self) -> None:
        """End the open episodes as at a turn limit, within half of `timeout_s`; `each` has the rest."""
        self.run(self._close())

    async def each(self, jobs: Sequence[Coroutine[Any, Any, None]]) -> list[str]:
        """Run jobs side by side until `timeout_s` after `close`; returns why each failed, "" for success."""
        if not jobs:
            return []
        tasks = [asyncio.create_task(_caught(job)) for job in jobs]
        _, late = await asyncio.wait(tasks, timeout=self._score_until - self._loop.time())
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=GRACE_S)
        too_late = f"scoring took longer than timeout_s = {self.timeout_s:g} s"
        return [too_late if task in late else task.result() for task in tasks]

    async def _step(self, actions: Mapping[int, Action]) -> dict[int, Observation]:
        # In the order of their numbers: observations must not depend on the order of a dictionary.
        for number in sorted(actions):
            self.episodes[number].act(actions[number])
        await self._settled(self._loop.time() + self.timeout_s)
        return {each.number: seen for each in self.episodes if (seen := each.observation) is not None}

    async def _close(self) -> None:
        now = self._loop.time()
        self._score_until = now + self.timeout_s
        for episode in self.episodes:
            if episode.task is None:
                episode.failure = "it was not started: those before it took all the time"
            episode.close()
        # Half of the time is left for scoring; `each` limits it.
        await self._settled(now + self.timeout_s / 2)

    async def _guarded(self, episode: Episode) -> None:
        assert self._play is not None
        try:
            await self._play(episode)
        except asyncio.CancelledError:
            # A reason given before, such as a time-out, is the cause of this cancellation.
            episode.failure = episode.failure or "the environment cancelled the episode"
        except BaseException as error:  # an environment may raise anything, and exit
            episode.failure = episode.failure or reason_of(error)

    async def _settled(self, deadline: float) -> None:
        while self._start_more(deadline) or any(episode.is_at_work for episode in self.episodes):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                late = [episode for episode in self.episodes if episode.is_at_work]
                for episode in late:
                    episode.failure = f"the environment took longer than timeout_s = {self.timeout_s:g} s"
                await self._cancel(late)

    def _start_more(self, deadline: float) -> bool:
        if self._loop.time() >= deadline:
            return False
        waiting = [episode for episode in self.episodes if episode.task is None and not episode.failure]
        num_open = sum(episode.task is not None and not episode.is_over for episode in self.episodes)
        room = max(self.at_once - num_open, 0) if self.at_once else len(waiting)
        for episode in waiting[:room]:
            episode.task = asyncio.create_task(self._guarded(episode))
            episode.task.add_done_callback(lambda _: self._changed.set())
        return bool(waiting[:room])

    async def _cancel(self, episodes: Sequence[Episode]) -> None:
        tasks = [episode.task for episode in episodes if episode.task is not None and not episode.task.done()]
        for episode in episodes:
            episode.dropped = True
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)


def reason_of(error: BaseException) -> str:
    parts: list[str] = []
    seen: BaseException | None = error
    # Deeper causes are the library's plumbing, and chains may be circular.
    while seen is not None and len(parts) < 4:
        parts.append(f"{type(seen).__name__}: {seen}".removesuffix(": "))
        seen = seen.__cause__
    return " <- ".join(parts)


async def _caught(job: Awaitable[None]) -> str:
    try:
        await job
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return reason_of(error)
    return ""


class _Executor(ThreadPoolExecutor):
    """Threads for the environment's blocking calls; the library's own calls run at once, in the loop's thread.

    The library moves trifles (reading a response) to threads. These end in any order; episodes would then continue in
    any order, and draw from shared random generators in any order.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        target = fn.args[0] if isinstance(fn, functools.partial) and fn.args else fn
        if not str(getattr(target, "__module__", "")).startswith("verifiers."):
            return super().submit(fn, *args, **kwargs)
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


Plain = TypeVar("Plain")


class PlayedEnvironment(ABC, Generic[Plain]):
    """Episodes side by side; a subclass sets `_loop` in `load`. It pickles as its settings."""

    def __init__(self, settings: Plain) -> None:
        self.settings = settings
        self._loop: EpisodeLoop | None = None

    def __getstate__(self) -> Plain:
        return self.settings

    def __setstate__(self, settings: Plain) -> None:
        self.__init__(settings)  # type: ignore[misc]

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        return self._started().reset(examples, self._play)

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        """Continue the episodes; returns within `timeout_s`, plus a second in which episodes that were cut clean up."""
        return self._started().step(actions)

    def results(self) -> Sequence[EpisodeResult]:
        """Return the results in order; an open episode gets no further action, as at a turn limit."""
        loop = self._started()
        loop.close()
        return [self._result(episode) for episode in loop.episodes]

    @abstractmethod
    async def _play(self, episode: Episode) -> None: ...

    @abstractmethod
    def _result(self, episode: Episode) -> EpisodeResult:
        """Return the score, or the answer for the run's reward; a failed score if the environment failed."""

    def _started(self) -> EpisodeLoop:
        if self._loop is None:
            raise RuntimeError("load() comes first")
        return self._loop


Arguments = TypeVar("Arguments", bound=Table)
MAX_TURNS = 16  # of an episode, where [environment] max_turns leaves it open


@dataclass(frozen=True, kw_only=True)
class Settings(Generic[Arguments]):
    """A provider's own keys and the other values that it needs of the configuration, as plain data."""

    table: Arguments
    clean: Cleaner
    place: str  # of `args`, for messages
    max_turns: int = MAX_TURNS
    timeout_s: float = 60.0  # between two turns of all episodes together
    system_prompt: str = ""
    instruction: str = ""

    @classmethod
    def of(cls, context: PluginContext, *, most_chars: str) -> Self:
        """Read the settings of a run; `most_chars` names the key that limits the text of a result or observation."""
        config, table, problems = context.config, cast("Any", context.params), []
        turns, timeout_s = config.environment.max_turns, config.environment.timeout_s
        if turns == 0:
            what, fix = "0 turns leave nothing to play", f"use 1 or more, or -1 for {MAX_TURNS}"
            where = config.place("environment.max_turns")
            problems.append(Problem(code="environment.no-turns", where=where, what=what, fix=fix))
        if table.call_timeout_s >= timeout_s:
            what = f"timeout_s = {timeout_s:g} is not above call_timeout_s = {table.call_timeout_s:g}"
            fix = "raise timeout_s, or lower call_timeout_s in args"
            where = config.place("environment.timeout_s")
            problems.append(Problem(code="environment.call-timeout", where=where, what=what, fix=fix))
        if problems:
            raise ConfigError(*problems)
        return cls(
            table=table,
            clean=Cleaner.of(context.tokenizer, getattr(table, most_chars)),
            place=config.place("environment.args"),
            max_turns=turns if turns > 0 else MAX_TURNS,
            timeout_s=timeout_s,
            system_prompt=config.data.system_prompt,
            instruction=config.data.instruction,
        )


def require_library(context: PluginContext, module: str, extra: str) -> None:
    """ConfigError with the install line when the library of a provider is missing; the library is not imported."""
    if importlib.util.find_spec(module) is None:
        what, fix = f"the package {module!r} is not installed", f"install it: {install_line('retrain-rewards', extra)}"
        where = context.config.place("environment.provider")
        raise refused(where, code="plugin.missing-package", what=what, fix=fix)
