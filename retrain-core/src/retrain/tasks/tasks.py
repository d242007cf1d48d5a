"""Loads the tasks of a run, from a data source or an environment, and their verifier."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.verifier import Environment, LoadedData, Verifier
from retrain.kernel.plugins.build import build_part
from retrain.kernel.types import Kind
from retrain.tasks.environment_process import EnvironmentProcess
from retrain.tasks.prompts import PromptPool, build_pool
from retrain.tasks.scoring.build import brings_tasks, comparing_rewards, load_data
from retrain.tasks.scoring.shadow import build_service
from retrain.tasks.verifiers import EnvironmentPlayer, EnvironmentVerifier, Player, RewardVerifier
from retrain.text.context import context_length
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
PROVIDER = "environment.provider"


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
    player = _player(context) if _provider(config) else None
    verifier = RewardVerifier(service, player)
    with closed_on_error(verifier):
        tasks = _tasks(data, verifier, context, comparing=comparing_rewards(service.rewards))
        service.launch()
    return tasks


def _from_environment(context: PluginContext) -> Tasks:
    environment = _in_a_process(_built_environment(context), context.config)
    verifier = EnvironmentVerifier(environment)
    with closed_on_error(verifier):
        return _tasks(environment.load(), verifier, context, is_environment=True)


def _player(context: PluginContext) -> Player:
    """What plays the tasks of `[data]`: a part that makes rollouts itself, or an environment of episodes."""
    built = _built_environment(context)
    if hasattr(built, "rollouts"):
        player: Player = built
        return player
    return EnvironmentPlayer(_in_a_process(built, context.config))


def _built_environment(context: PluginContext) -> Any:
    return build_part(Kind.ENVIRONMENT, _provider(context.config), PROVIDER, context)


def _in_a_process(environment: Environment, config: Config) -> EnvironmentProcess:
    return EnvironmentProcess(
        environment,
        name=str(config.environment.id or _provider(config)),
        timeout_s=config.environment.timeout_s,
        memory_gb=config.scoring.memory_gb,
    )


def _provider(config: Config) -> str:
    provider: str = config.value(PROVIDER, "")
    return provider


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
