"""Loads the tasks of a run, from a data source or an environment, and whatever judges the answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData
from retrain.kernel.plugins.build import build_part
from retrain.kernel.terminal_text import printable
from retrain.kernel.types import Kind
from retrain.rooms.audit.report import AuditReport, raise_on_failure
from retrain.rooms.audit.start import audit_environment, audit_rewards
from retrain.rooms.tasks.environment_process import HostedEnvironment
from retrain.rooms.tasks.prompts import PromptPool, build_pool
from retrain.rooms.tasks.scoring.build import build_rewards
from retrain.rooms.tasks.scoring.service import ScoringService
from retrain.rooms.text.context import context_length

LOG = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """The prompts of a run, and who judges what the policy makes of them."""

    pool: PromptPool
    judge: ScoringService | HostedEnvironment
    context_length: int | None
    notes: tuple[str, ...]  # on what was read and what was left out


@contextmanager
def closed_on_error(judge: ScoringService | HostedEnvironment) -> Iterator[None]:
    """End the processes of a judge when the block fails; they stay when it succeeds."""
    try:
        yield
    except BaseException:
        judge.close()
        raise


def load_tasks(context: PluginContext) -> Tasks:
    """The tasks of `[environment]`, or of `[data]` with its reward. The judge's processes come up when it returns."""
    LOG.info("Loading dataset...")
    provider = context.config.value("environment.provider", "")
    return _from_environment(provider, context) if provider else _from_source(context)


def audit_tasks(tasks: Tasks, context: PluginContext, settings: ScoringTable) -> AuditReport:
    """Try the judge on some of the tasks; see `retrain.rooms.audit`."""
    if isinstance(tasks.judge, ScoringService):
        return audit_rewards(tasks.pool, tasks.judge, context.tokenizer, settings)
    return audit_environment(tasks.pool, tasks.judge, context.tokenizer, settings)


def refuse_bad_judge(tasks: Tasks, context: PluginContext) -> None:
    """The audit before training: RewardError when the judge failed it, unless `[scoring] audit` says otherwise."""
    config = context.config
    if isinstance(tasks.judge, ScoringService):
        tasks.judge.start()
    if config.scoring.audit == "off":
        return
    report = audit_tasks(tasks, context, config.scoring)
    raise_on_failure(report, config.scoring.audit, place=config.place("scoring.audit"))
    LOG.info("%s", report.line())


def _from_source(context: PluginContext) -> Tasks:
    config = context.config
    options = config.data.options
    source = build_part(Kind.DATA_SOURCE, config.data.source, "data.source", context, options, "data.options")
    data: LoadedData = source.load()
    scoring = ScoringService(build_rewards(config, context, data.reward), config.scoring)
    with closed_on_error(scoring):
        tasks = _tasks(data, scoring, context)
        scoring.launch()
    return tasks


def _from_environment(provider: str, context: PluginContext) -> Tasks:
    config = context.config
    environment = build_part(Kind.ENVIRONMENT, provider, "environment.provider", context)
    hosted = HostedEnvironment(
        environment,
        name=str(config.value("environment.id", "") or provider),
        timeout_s=config.value("environment.timeout_s", 60.0),
        memory_gb=config.scoring.memory_gb,
    )
    with closed_on_error(hosted):
        return _tasks(hosted.load(), hosted, context)


def _tasks(data: LoadedData, judge: ScoringService | HostedEnvironment, context: PluginContext) -> Tasks:
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
        is_environment=isinstance(judge, HostedEnvironment),
    )
    for note in notes:
        LOG.info("%s", printable(note))
    LOG.info("Pre-encoded %d prompts", len(pool.train) + len(pool.held_out))
    return Tasks(pool=pool, judge=judge, context_length=limit, notes=(*data.notes, *notes))
