"""Loads the tasks of a run, from a data source or an environment, and their verifier."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Prompt, Reward, Rollouts, TimedScore, Verifier
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.types import Example, Kind, SamplingParams
from retrain.tasks.prompts import PromptPool, build_pool
from retrain.tasks.rollout import SingleTurn
from retrain.tasks.scoring.build import brings_tasks, build_service, comparing_rewards, judges, load_data
from retrain.tasks.scoring.service import ScoringService
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import context_length

LOG = logging.getLogger("retrain")


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """The prompts of a run and their verifier; `notes` say what was read and what was left out."""

    pool: PromptPool
    verifier: Verifier
    context_length: int | None
    notes: tuple[str, ...]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Every prompt, held-out ones last."""
        return (*self.pool.train, *self.pool.held_out)


@contextmanager
def closed_on_error(verifier: Verifier) -> Iterator[None]:
    """End the verifier's processes when the block fails; they stay up when it succeeds."""
    try:
        yield
    except BaseException:
        verifier.close()
        raise


def load_tasks(context: PluginContext) -> Tasks:
    """The tasks of `[environment]`, or of `[data]` with its reward; the verifier may still be starting up."""
    LOG.info("Loading dataset...")
    context.config.refuse_lost("data", "reward", "environment")
    brings = brings_tasks(context.config, context.plugins)
    return _from_environment(context) if brings else _from_source(context)


def _from_source(context: PluginContext) -> Tasks:
    config = context.config
    data = load_data(config, context)
    service = build_service(config, context, data.reward)
    player = _player(context) if config.environment.provider else None
    verifier = RewardVerifier(service, player)
    with closed_on_error(verifier):
        tasks = _tasks(data, verifier, context, comparing=comparing_rewards(service.rewards))
        service.launch()
    return tasks


def _from_environment(context: PluginContext) -> Tasks:
    from retrain.tasks.environment import EnvironmentProcess, EnvironmentVerifier

    verifier = EnvironmentVerifier(EnvironmentProcess.of(_built_environment(context), context.config))
    with closed_on_error(verifier):
        return _tasks(verifier.environment.load(), verifier, context, is_environment=True)


def _player(context: PluginContext) -> Player:
    """What plays the tasks of `[data]`: a part that makes rollouts itself, or an environment of episodes."""
    built: Any = _built_environment(context)
    if hasattr(built, "rollouts"):
        player: Player = built
        return player
    from retrain.tasks.environment import EnvironmentPlayer, EnvironmentProcess

    return EnvironmentPlayer(EnvironmentProcess.of(built, context.config))


def _built_environment(context: PluginContext) -> Any:
    return build_part(Kind.ENVIRONMENT, context.config.environment.provider, "environment.provider", context)


def _tasks(
    data: LoadedData,
    verifier: Verifier,
    context: PluginContext,
    *,
    comparing: frozenset[str] = frozenset(),
    is_environment: bool = False,
) -> Tasks:
    for note in data.notes:
        LOG.info("%s", printable(note))
    LOG.info("Loaded %d examples", len(data.examples))
    limit = context_length(context.config, context.plugins)
    pool, notes = build_pool(
        data,
        context.config,
        context.tokenizer,
        context.seeds,
        context_length=limit,
        comparing=comparing,
        is_environment=is_environment,
    )
    for note in notes:
        LOG.info("%s", printable(note))
    LOG.info("Pre-encoded %d prompts", len(pool.train) + len(pool.held_out))
    return Tasks(pool=pool, verifier=verifier, context_length=limit, notes=(*data.notes, *notes))
