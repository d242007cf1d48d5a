"""Loads the tasks of a run, from a data source or an environment, and their verifier."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Prompt, Reward, Rollouts, TimedScore, Verifier
from retrain.kernel.types import Example, SamplingParams
from retrain.tasks.prompts import PromptPool, build_pool
from retrain.tasks.rollout import SingleTurn, budget_of
from retrain.tasks.scoring.build import brings_tasks, build_service, comparing_rewards, judges, load_data
from retrain.tasks.scoring.service import ScoringService
from retrain.text.terminal_text import printable
from retrain.text.thinking import thinking_of
from retrain.text.tokenizer import context_length

if TYPE_CHECKING:
    from retrain.tasks.environment import Player

LOG = logging.getLogger("retrain")


class RewardVerifier:
    """The rewards of a run in scoring processes; a rollout is one answer, or an episode of `player`."""

    def __init__(self, service: ScoringService, player: Player | None = None) -> None:
        self.service, self.player = service, player
        self.names: tuple[str, ...] = service.names
        self.rewards: tuple[Reward, ...] = tuple(named.reward for named in service.rewards)
        self.timeout_s: float | None = min(limits.timeout_s for limits in service.limits)

    def start(self) -> None:
        self.service.start()
        if self.player is not None:
            self.player.start()

    def score_texts(self, pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        with self.service.batch("audit", fresh=True) as batch:
            for example, text in pairs:
                batch.submit(example, text)
            scores = batch.collect(within_budget=False)
            return [TimedScore(score=s, seconds=t) for s, t in zip(scores, batch.seconds, strict=True)]

    def rollouts(
        self, backend: Backend, context: PluginContext, params: SamplingParams, context_length: int | None
    ) -> Rollouts:
        if self.player is not None:
            return self.player.rollouts(backend, self.service, context, params, context_length)
        thinking = thinking_of(context.config, context.tokenizer)
        return SingleTurn(
            thinking=thinking,
            budget=budget_of(context.config, thinking, context_length),
            backend=backend,
            tokenizer=context.tokenizer,
            scoring=self.service,
            params=params,
            progress=context.sampling_progress,
            has_verifier=judges(self.rewards),
        )

    def close(self) -> None:
        self.service.close()
        if self.player is not None:
            self.player.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """The prompts of a run and their verifier; `notes` report the data read and left out.

    A run of `[[data.tasks]]` has `several`; one of these has its `name`, and in `context` its own configuration.
    """

    pool: PromptPool
    verifier: Verifier
    context_length: int | None
    notes: tuple[str, ...]
    context: PluginContext
    name: str = ""
    weight: float = 1.0
    several: tuple[Tasks, ...] = ()

    @property
    def each(self) -> tuple[Tasks, ...]:
        """The tasks one by one: these themselves unless they are several."""
        return self.several or (self,)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (*self.pool.train, *self.pool.held_out)


@contextmanager
def closed_on_error(verifier: Verifier) -> Iterator[None]:
    try:
        yield
    except BaseException:
        verifier.close()
        raise


def load_task(context: PluginContext, name: str = "") -> Tasks:
    """Load the task of `[environment]`, or of `[data]` with its reward; the verifier may still be starting up."""
    LOG.info("Loading dataset%s...", f" of task {name}" if name else "")
    config, player = context.config, None
    if brings_tasks(config, context.plugins):
        from retrain.tasks.environment import EnvironmentVerifier, environment_of

        brought = EnvironmentVerifier(environment_of(context, task=name))
        with closed_on_error(brought):
            return _tasks(brought.environment.load(), brought, context, name, is_environment=True)
    data = load_data(config, context)
    service = build_service(config, context, data.reward)
    if config.environment.provider:
        from retrain.tasks.environment import player_of

        player = player_of(context, task=name)
    verifier = RewardVerifier(service, player)
    with closed_on_error(verifier):
        tasks = _tasks(data, verifier, context, name, comparing=comparing_rewards(service.rewards))
        service.launch()
    return tasks


def _tasks(
    data: LoadedData,
    verifier: Verifier,
    context: PluginContext,
    name: str,
    *,
    comparing: frozenset[str] = frozenset(),
    is_environment: bool = False,
) -> Tasks:
    for note in data.notes:
        LOG.info("%s", printable(note))
    LOG.info("Loaded %d examples", len(data.examples))
    limit = context_length(context.config, context.plugins)
    budget_of(context.config, thinking_of(context.config, context.tokenizer), limit)  # refused before a model loads
    pool, notes = build_pool(
        data,
        context.config,
        context.tokenizer,
        context.seeds,
        context_length=limit,
        comparing=comparing,
        is_environment=is_environment,
        task=name,
    )
    for note in notes:
        LOG.info("%s", printable(note))
    LOG.info("Pre-encoded %d prompts", len(pool.train) + len(pool.held_out))
    return Tasks(
        pool=pool, verifier=verifier, context_length=limit, notes=(*data.notes, *notes), context=context, name=name
    )
