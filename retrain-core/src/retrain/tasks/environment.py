"""An environment in a process that is killed when it does not answer in time; as verifier and as player."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.config.resolved import Config
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
from retrain.kernel.types import Example, SamplingParams, Score, StopReason
from retrain.tasks.child.process import Child, ChildDied, ChildError, ChildTimeout
from retrain.tasks.episodes import Episodes
from retrain.tasks.scoring.service import ScoringService
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
LOAD_TIMEOUT_S = 1800.0  # it may install a package and fetch a data set
GRACE_S = 10.0  # beyond the environment's own limit, by which it should have cut off whatever hangs
MAX_TURNS = 32  # of an episode in `score_texts`; a longer one is scored as it stands


class EnvironmentProcess:
    """The environment as the run sees it; its own loop, tools and verifier work in a child process.

    When the child dies or hangs, all open episodes end with a failed score, and the next `reset` starts another child.
    """

    def __init__(self, environment: Any, *, name: str, timeout_s: float, memory_gb: float) -> None:
        self.name = name
        self._environment = environment
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._child: Child | None = None
        self._is_loaded = False
        self._count = 0  # episodes since the last reset
        self._lost = ""  # why the open episodes are lost

    @classmethod
    def of(cls, environment: Environment, config: Config) -> EnvironmentProcess:
        """The environment of a run, with the limits that its configuration sets."""
        return cls(
            environment,
            name=str(config.environment.id or config.environment.provider),
            timeout_s=config.environment.timeout_s,
            memory_gb=config.scoring.memory_gb,
        )

    def load(self) -> LoadedData:
        """All tasks. Raises the environment's own ConfigError; RewardError when its process dies or hangs."""
        try:
            found: LoadedData = self._running().call("load", timeout_s=LOAD_TIMEOUT_S)
            self._is_loaded = True
        except (ChildDied, ChildTimeout) as error:
            what = f"environment {self.name!r} could not be loaded: {error}"
            raise RewardError(
                Problem(where="[environment]", what=what, fix="try it alone, or choose another")
            ) from error
        return found

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        """Start one episode per entry; no observations when they are lost."""
        self._count, self._lost = len(examples), ""
        return self._call("reset", list(examples)) or {}

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        """The next observations of the open episodes; none when all have ended or are lost."""
        return self._call("step", dict(actions)) or {}

    def results(self) -> Sequence[EpisodeResult]:
        """The results; a failed score for every episode when they are lost."""
        results: Sequence[EpisodeResult] | None = self._call("results")
        if results is None:
            return [EpisodeResult(score=Score.failed(self._lost))] * self._count
        return results

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _call(self, method: str, *arguments: object) -> Any:
        """The method's value, or None once the episodes are lost."""
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


class EnvironmentPlayer:
    """An environment in a process of its own as the player of the tasks of `[data]`; see `Player`."""

    def __init__(self, environment: EnvironmentProcess) -> None:
        self.environment = environment
        self._is_loaded = False

    def start(self) -> None:
        """Start the process, and have the environment load what it needs; its notes go to the log."""
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
        """One episode per rollout, whose answer the rewards judge."""
        self.start()
        return Episodes(backend, context, self.environment, params, context_length, scoring)

    def close(self) -> None:
        """End the environment's process."""
        self.environment.close()


class EnvironmentVerifier:
    """An environment in a process of its own, which started when its tasks were loaded; see `Verifier`."""

    rewards: tuple[Reward, ...] = ()
    timeout_s: float | None = None

    def __init__(self, environment: EnvironmentProcess) -> None:
        self.environment = environment
        self.names: tuple[str, ...] = (environment.name,)

    def start(self) -> None:
        """Nothing is left to start."""

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
        """One episode per rollout."""
        return Episodes(backend, context, self.environment, params, context_length)

    def close(self) -> None:
        """End the environment's process."""
        self.environment.close()
