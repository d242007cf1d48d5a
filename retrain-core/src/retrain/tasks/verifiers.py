"""The two verifiers of a run behind one interface: rewards of single answers, and an environment's episodes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Rollouts
from retrain.kernel.contracts.verifier import Action, Reward, TimedScore
from retrain.kernel.types import Example, SamplingParams, StopReason
from retrain.tasks.environment_process import EnvironmentProcess
from retrain.tasks.episodes import Episodes
from retrain.tasks.rollout import SingleTurn
from retrain.tasks.scoring.build import judges
from retrain.tasks.scoring.service import ScoringService
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
MAX_TURNS = 32  # of an episode in `score_texts`; a longer one is scored as it stands


class Player(Protocol):
    """An environment with the trait `plays_data` that makes the rollouts by itself, instead of step by step."""

    def start(self) -> None:
        """Try what can be tried before the model loads; ConfigError or PluginError says what is wrong."""

    def rollouts(
        self,
        backend: Backend,
        scoring: ScoringService,
        context: PluginContext,
        params: SamplingParams,
        context_length: int | None,
    ) -> Rollouts:
        """The rollouts of a run that samples from `backend`, with `scoring` for what comes of them."""

    def close(self) -> None:
        """End the processes; safe to call twice."""


class RewardVerifier:
    """The rewards of a run, in the processes of its scoring service; see `Verifier`.

    A rollout is one answer of the policy, or what `player` makes of a task.
    """

    def __init__(self, service: ScoringService, player: Player | None = None) -> None:
        self.service, self.player = service, player
        self.names: tuple[str, ...] = service.names
        self.rewards: tuple[Reward, ...] = tuple(named.reward for named in service.rewards)
        self.timeout_s: float | None = min(limits.timeout_s for limits in service.limits)

    def start(self) -> None:
        """Start the scoring processes and prepare the rewards."""
        self.service.start()
        if self.player is not None:
            self.player.start()

    def score_texts(self, pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        """Score each text as a completion."""
        with self.service.batch("audit", fresh=True) as batch:
            for example, text in pairs:
                batch.submit(example, text)
            scores = batch.collect(within_budget=False)
            return [TimedScore(score=s, seconds=t) for s, t in zip(scores, batch.seconds, strict=True)]

    def rollouts(
        self, backend: Backend, context: PluginContext, params: SamplingParams, context_length: int | None
    ) -> Rollouts:
        """One answer per rollout, or one episode of the player."""
        if self.player is not None:
            return self.player.rollouts(backend, self.service, context, params, context_length)
        return SingleTurn(
            backend=backend,
            tokenizer=context.tokenizer,
            scoring=self.service,
            params=params,
            progress=context.sampling_progress,
            has_verifier=judges(self.rewards),
        )

    def close(self) -> None:
        """End the scoring processes, and those of the player."""
        self.service.close()
        if self.player is not None:
            self.player.close()


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
        return _episodes(self.environment, backend, context, params, context_length, scoring)

    def close(self) -> None:
        """End the environment's process."""
        self.environment.close()


class EnvironmentVerifier:
    """An environment in a process of its own, which started when its tasks were loaded; see `Verifier`."""

    def __init__(self, environment: EnvironmentProcess) -> None:
        self.environment = environment
        self.names: tuple[str, ...] = (environment.name,)
        self.rewards: tuple[Reward, ...] = ()
        self.timeout_s: float | None = None

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
        return _episodes(self.environment, backend, context, params, context_length)

    def close(self) -> None:
        """End the environment's process."""
        self.environment.close()


def _episodes(
    environment: EnvironmentProcess,
    backend: Backend,
    context: PluginContext,
    params: SamplingParams,
    context_length: int | None,
    scoring: ScoringService | None = None,
) -> Episodes:
    return Episodes(
        backend=backend,
        tokenizer=context.tokenizer,
        environment=environment,
        scoring=scoring,
        params=params,
        config=context.config,
        context_length=context_length,
        progress=context.sampling_progress,
    )
