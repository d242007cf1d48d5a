"""Builds the parts of a run from its configuration, in the order in which a user wants to hear about faults."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Controller, PlanningDetector
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.pacing import Pacer
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.plugins.build import build_part
from retrain.kernel.plugins.check import backend_options, check_names, check_options, declared_capabilities
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Kind, SamplingParams
from retrain.rooms.credit.flow import CreditFlow, build_flow
from retrain.rooms.health.watch import HealthWatch, monitor_names
from retrain.rooms.recorders.recording import Recorders, recorder_names
from retrain.rooms.session.interrupts import Interrupts
from retrain.rooms.tasks.episodes import Episodes
from retrain.rooms.tasks.prompts import PromptPool
from retrain.rooms.tasks.rollout import Rollouts, SingleTurn
from retrain.rooms.tasks.scoring.service import ScoringService
from retrain.rooms.tasks.tasks import Tasks, closed_on_error, load_tasks, refuse_bad_judge
from retrain.rooms.text.tokenizer.load import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything that a run is made of, apart from its records."""

    config: Config
    plugins: Plugins
    seeds: Seeds
    flow: CreditFlow
    tokenizer: Any
    pool: PromptPool
    backend: Backend
    rollouts: Rollouts
    controller: Controller | None
    pacer: Pacer | None
    detector: PlanningDetector | None
    recorders: Recorders
    health: HealthWatch

    def close(self) -> None:
        """Release device memory and processes; safe to call twice."""
        self.rollouts.close()
        self.backend.close()


def check(
    config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]
) -> tuple[CreditFlow | None, list[Problem]]:
    """Every problem that can be found without data, model or heavy import, and the credit flow if it has none."""
    problems = check_names(config, plugins, tables) + check_options(config, plugins)
    for found in plugins.notify("retrain_check_config", config=config, plugins=plugins):
        problems += found or ()
    try:
        flow = build_flow(config, plugins)
    except RetrainError as error:
        return None, [*problems, *error.problems]
    return flow, problems + _check_entropy(config, plugins, flow)


def _check_entropy(config: Config, plugins: Plugins, flow: CreditFlow) -> list[Problem]:
    capabilities = declared_capabilities(config, plugins)
    if not flow.needs_entropy or capabilities is None or capabilities.provides_entropy:
        return []
    drawn_by = f"backend {config.backend.backend!r} with engine {config.value('inference.engine', 'pytorch')!r}"
    what = f"{flow.uncertainty.name!r} needs entropies, which {drawn_by} cannot give"
    fix = 'use uncertainty_kind = "surprisal", or backend = "local" with engine = "pytorch"'
    return [Problem(where=config.place("algorithm.uncertainty_kind"), what=what, fix=fix)]


def assemble(
    config: Config, plugins: Plugins, flow: CreditFlow, seeds: Seeds, interrupts: Interrupts | None = None
) -> Parts:
    """Load tokenizer, data and model, in this order, and whatever the flow asks for."""
    stops = interrupts or Interrupts(grace_s=config.training.grace_s)
    tokenizer = load_tokenizer(config, plugins)
    context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer, check_stop=stops.check)
    tasks = load_tasks(context)
    with closed_on_error(tasks.judge):
        _import_backend(context)  # takes longest; the judge's process comes up meanwhile
        refuse_bad_judge(tasks, context)
        detector = build_detector(flow, context)
        controller = None
        if flow.controller:
            controller = build_part(Kind.CONTROLLER, flow.controller, "algorithm.transform_mode", context)
        pacer = None
        if config.value("backpressure.enabled", False):
            pacer = build_part(Kind.PACER, config.value("backpressure.pacer", "usl"), "backpressure.pacer", context)
        recorders = {
            name: build_part(Kind.RECORDER, name, path, context) for name, path in recorder_names(config).items()
        }
        monitors = {n: build_part(Kind.HEALTH_MONITOR, n, "health.monitors", context) for n in monitor_names(config)}
        options = backend_options(config, plugins)
        backend = build_part(
            Kind.BACKEND, config.backend.backend, "backend.backend", context, options, "backend.options"
        )
    return Parts(
        config=config,
        plugins=plugins,
        seeds=seeds,
        flow=flow,
        tokenizer=context.tokenizer,
        pool=tasks.pool,
        backend=backend,
        rollouts=_rollouts(tasks, backend, context),
        controller=controller,
        pacer=pacer,
        detector=detector,
        recorders=Recorders(recorders),
        health=HealthWatch(monitors, policy=config.value("health.policy", "warn")),
    )


def _import_backend(context: PluginContext) -> None:
    """Import the backend and no more; what is wrong with it is told when its turn comes."""
    config = context.config
    with suppress(RetrainError):
        resolve(
            context.plugins,
            Kind.BACKEND,
            config.backend.backend,
            where=config.place("backend.backend"),
            search_paths=config.plugins.search_paths,
        )


def _rollouts(tasks: Tasks, backend: Backend, context: PluginContext) -> Rollouts:
    training = context.config.training
    params = SamplingParams(
        max_tokens=training.max_tokens,
        temperature=training.temperature,
        entropy=backend.capabilities.provides_entropy,
    )
    if isinstance(tasks.judge, ScoringService):
        return SingleTurn(backend=backend, tokenizer=context.tokenizer, scoring=tasks.judge, params=params)
    return Episodes(
        backend=backend,
        tokenizer=context.tokenizer,
        environment=tasks.judge,
        params=params,
        config=context.config,
        context_length=tasks.context_length,
    )


def build_detector(flow: CreditFlow, context: PluginContext) -> PlanningDetector | None:
    """The configured planning detector, if the flow asks for planning tokens."""
    if not flow.needs_planning:
        return None
    name = context.config.value("planning.detector", "regex")
    detector: PlanningDetector = build_part(Kind.PLANNING_DETECTOR, name, "planning.detector", context)
    return detector
