"""Keeps an environment in a process of its own, which is killed when it does not answer in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.contracts.tasks import Ask, Ending, Environment, LoadedData, Reply
from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.types import Example, Score
from retrain.rooms.tasks.child.errors import ChildDied, ChildError, ChildTimeout
from retrain.rooms.tasks.child.process import Child

LOAD_TIMEOUT_S = 1800.0  # it may install a package and fetch a data set
GRACE_S = 10.0  # beyond the environment's own limit, after which it should have cut off what hangs


class HostedEnvironment:
    """The environment as the run sees it; its own loop, tools and verifier work in a child process.

    When the child dies or hangs, all episodes under way end with a failed score, and the next `begin` starts another.
    """

    def __init__(self, environment: Environment, *, name: str, timeout_s: float, memory_gb: float) -> None:
        self._environment = environment
        self.name = name
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._child: Child | None = None
        self._is_loaded = False
        self._count = 0  # episodes begun
        self._lost = ""  # why the episodes under way are lost

    def load(self) -> LoadedData:
        """All tasks. ConfigError as the environment tells it; RewardError when its process dies or hangs."""
        try:
            found: LoadedData = self._running().call("load", timeout_s=LOAD_TIMEOUT_S)
            self._is_loaded = True
        except (ChildDied, ChildTimeout) as error:
            what = f"environment {self.name!r} could not be loaded: {error}"
            raise RewardError(
                Problem(where="[environment]", what=what, fix="try it alone, or choose another")
            ) from error
        return found

    def begin(self, examples: Sequence[Example]) -> None:
        """Start one episode per entry."""
        self._count, self._lost = len(examples), ""
        self._call("begin", list(examples))

    def advance(self, replies: Mapping[int, Reply]) -> Mapping[int, Ask]:
        """What the open episodes ask next; none when they are all over, or lost."""
        return self._call("advance", dict(replies)) or {}

    def finish(self) -> Sequence[Ending]:
        """The endings; a failed score for every episode when they were lost."""
        endings: Sequence[Ending] | None = self._call("finish")
        if endings is None:
            return [Ending(score=Score.failed(self._lost))] * self._count
        return endings

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
            if self._is_loaded:  # this one takes the place of another
                self._child.call("load", timeout_s=LOAD_TIMEOUT_S)
        return self._child
