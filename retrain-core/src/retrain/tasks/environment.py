"""An environment in a process that is killed when it does not answer in time; as verifier and as player."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import (
    Action,
    Environment,
    EpisodeResult,
    LoadedData,
    Observation,
    Reward,
    Rollouts,
    TimedScore,
)
from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.types import Example, Kind, SamplingParams, Score, StopReason, prefix_of
from retrain.tasks.child.process import Child, ChildDied, ChildError, ChildTimeout
from retrain.tasks.episodes import Episodes
from retrain.tasks.scoring.service import ScoringService
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
# Loading may install a package and fetch a data set.
LOAD_TIMEOUT_S = 1800.0
# The environment's own limit should already have ended a call that hangs.
GRACE_S = 10.0
MAX_TURNS = 32  # of an episode in `score_texts`; a longer one is scored after so many


class EnvironmentProcess:
    """The environment in a child process; when that dies or hangs, open episodes fail and `reset` starts another.

    It knows its examples by their ids without the name of the `task`.
    """

    def __init__(self, environment: Any, *, name: str, timeout_s: float, memory_gb: float, task: str = "") -> None:
        self.name, self._prefix = name, prefix_of(task)
        self._environment = environment
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._child: Child | None = None
        self._is_loaded = False
        self._count = 0  # episodes since the last reset
        self._lost = ""  # why the open episodes are lost

    def load(self) -> LoadedData:
        """Return all tasks. Raises the environment's own ConfigError; RewardError when its process dies or hangs."""
        try:
            found: LoadedData = self._running().call("load", timeout_s=LOAD_TIMEOUT_S)
            self._is_loaded = True
        except (ChildDied, ChildTimeout) as error:
            what = f"environment {self.name!r} could not be loaded: {error}"
            where, fix = "[environment]", "try the environment outside retrain, or choose another"
            raise RewardError(Problem(code="environment.cannot-load", where=where, what=what, fix=fix)) from error
        return found

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        self._count, self._lost = len(examples), ""
        known = (
            [replace(each, id=each.id.removeprefix(self._prefix)) for each in examples] if self._prefix else examples
        )
        return self._call("reset", list(known)) or {}

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        return self._call("step", dict(actions)) or {}

    def results(self) -> Sequence[EpisodeResult]:
        results: Sequence[EpisodeResult] | None = self._call("results")
        if results is None:
            return [EpisodeResult(score=Score.failed(self._lost))] * self._count
        return results

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _call(self, method: str, *arguments: object) -> Any:
        if self._lost:
            return None
        try:
            return self._running().call(method, *arguments, timeout_s=self._timeout_s + GRACE_S)
        except (ChildDied, ChildTimeout, ChildError) as error:
            self._lost = f"environment {self.name!r} failed in {method}: {error}"
            self.close()
            return None

    def _running(self) -> Child:
        if self._child is None:
            self._child = Child(self._environment, name=self.name, memory_gb=self._memory_gb)
            self._child.start()
            if self._is_loaded:  # this one replaces another
                self._child.call("load", timeout_s=LOAD_TIMEOUT_S)
        return self._child


class Player(Protocol):
    """An environment with the trait `plays_data` that makes the rollouts itself, instead of step by step."""

    def start(self) -> None:
        """Check everything that needs no model; raises ConfigError or PluginError."""

    def rollouts(
        self,
        backend: Backend,
        scoring: ScoringService,
        context: PluginContext,
        params: SamplingParams,
        context_length: int | None,
    ) -> Rollouts:
        """Return the rollouts of a run that samples from `backend`; `scoring` judges them."""

    def close(self) -> None:
        """End the processes; idempotent."""


class EnvironmentPlayer:
    """An environment in a separate process that plays the tasks of `[data]`."""

    def __init__(self, environment: EnvironmentProcess) -> None:
        self.environment = environment
        self._is_loaded = False

    def start(self) -> None:
        if not self._is_loaded:
            for note in self.environment.load().notes:
                LOG.info("%s", printable(note))
        self._is_loaded = True

    def rollouts(
        self,
        backend: Backend,
        scoring: ScoringService,
        context: PluginContext,
        params: SamplingParams,
        context_length: int | None,
    ) -> Rollouts:
        self.start()
        return Episodes(backend, context, self.environment, params, context_length, scoring)

    def close(self) -> None:
        self.environment.close()


class EnvironmentVerifier:
    """An environment in a separate process that starts when its tasks are loaded."""

    rewards: tuple[Reward, ...] = ()
    timeout_s: float | None = None

    def __init__(self, environment: EnvironmentProcess) -> None:
        self.environment = environment
        self.names: tuple[str, ...] = (environment.name,)

    def start(self) -> None: ...

    def score_texts(self, pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        """Play one episode per text, in which the policy says that text every turn, up to `MAX_TURNS`."""
        started = time.perf_counter()
        observations = self.environment.reset([example for example, _ in pairs])
        turns = Counter[int]()
        while playing := [number for number in observations if turns[number] < MAX_TURNS]:
            turns.update(playing)
            actions = {number: Action(text=pairs[number][1], stop_reason=StopReason.EOS) for number in playing}
            observations = self.environment.step(actions)
        results = self.environment.results()
        seconds = (time.perf_counter() - started) / max(len(pairs), 1)
        return [TimedScore(score=result.score, seconds=seconds) for result in results]

    def rollouts(
        self, backend: Backend, context: PluginContext, params: SamplingParams, context_length: int | None
    ) -> Rollouts:
        return Episodes(backend, context, self.environment, params, context_length)

    def close(self) -> None:
        self.environment.close()


def environment_of(context: PluginContext, built: Environment | None = None, *, task: str = "") -> EnvironmentProcess:
    config = context.config
    return EnvironmentProcess(
        built or _built(context),
        name=str(config.environment.id or config.environment.provider),
        timeout_s=config.environment.timeout_s,
        memory_gb=config.scoring.memory_gb,
        task=task,
    )


def player_of(context: PluginContext, *, task: str = "") -> Player:
    """Return the player of the tasks of `[data]`: a part that makes rollouts itself, or an environment of episodes."""
    built = _built(context)
    return built if hasattr(built, "rollouts") else EnvironmentPlayer(environment_of(context, built, task=task))


def _built(context: PluginContext) -> Any:
    provider, args = context.config.environment.provider, context.config.environment.args
    return build_part(Kind.ENVIRONMENT, provider, "environment.provider", context, args, "environment.args")
