"""What the environments that play their episodes in an `EpisodeLoop` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from retrain.api import Action, EpisodeResult, Example, Observation
from retrain_rewards.episodes.episode import Episode
from retrain_rewards.episodes.loop import EpisodeLoop

Settings = TypeVar("Settings")


class PlayedEnvironment(ABC, Generic[Settings]):
    """Episodes side by side, behind `retrain.api.Environment`; `load`, which sets `_loop`, is left to the others.

    It holds plain data until `load` is called; a pickled copy holds plain data again. Not safe for several threads.
    """

    max_turns: int | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loop: EpisodeLoop | None = None

    def __getstate__(self) -> Settings:
        return self.settings

    def __setstate__(self, settings: Settings) -> None:
        self.__init__(settings)  # type: ignore[misc]

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        """Start one episode per entry; returns within `timeout_s`, as `step` does."""
        return self._started().reset(examples, self._play, self.max_turns)

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        """Continue the episodes; returns within `timeout_s`, plus a second in which episodes that were cut clean up."""
        return self._started().step(actions)

    def results(self) -> Sequence[EpisodeResult]:
        """What became of every episode, in order; an open one gets no further action, as at a turn limit."""
        loop = self._started()
        loop.close()
        return [self._result(episode) for episode in loop.episodes]

    @abstractmethod
    async def _play(self, episode: Episode) -> None:
        """Play one episode to its end."""

    @abstractmethod
    def _result(self, episode: Episode) -> EpisodeResult:
        """The score, or the answer for the run's reward; a failed score where the environment let it down."""

    def _started(self) -> EpisodeLoop:
        if self._loop is None:
            raise RuntimeError("load() comes first")
        return self._loop
