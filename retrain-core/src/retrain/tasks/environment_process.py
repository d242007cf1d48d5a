"""Keeps an environment in a process of its own, which is killed when it does not answer in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.contracts.verifier import Action, EpisodeResult, LoadedData, Observation
from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.types import Example, Score
from retrain.tasks.child.process import Child, ChildDied, ChildError, ChildTimeout

LOAD_TIMEOUT_S = 1800.0  # it may install a package and fetch a data set
GRACE_S = 10.0  # beyond the environment's own limit, by which it should have cut off whatever hangs


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
