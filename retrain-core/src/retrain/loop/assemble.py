"""Builds the parts of a run from its configuration, in the order in which a user wants to hear about faults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config.load import TableEntry
from retrain.config.resolved import DEFAULT_ORIGIN, Config
from retrain.credit.flow import CreditFlow, build_flow
from retrain.errors import ConfigError, Problem, RetrainError
from retrain.loop.build import build_part
from retrain.loop.health import HealthWatch, monitor_names
from retrain.loop.interrupts import Interrupts
from retrain.loop.lines import printable
from retrain.loop.prompts import Prompt, PromptPool, encode_prompt, split_examples
from retrain.loop.recording import Recorders, recorder_names
from retrain.plugins.check import backend_options, check_names, check_options, declared_capabilities
from retrain.plugins.manager import Plugins
from retrain.plugins.pacing import Pacer
from retrain.plugins.protocols import Backend, Controller, LoadedData, PlanningDetector, PluginContext, Reward
from retrain.seeding import Seeds
from retrain.types import Kind

LOG = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything that a run is made of, apart from its records."""

    config: Config
    plugins: Plugins
    seeds: Seeds
    flow: CreditFlow
    tokenizer: Any
    pool: PromptPool
    reward: Reward
    backend: Backend
    controller: Controller | None
    pacer: Pacer | None
    detector: PlanningDetector | None
    recorders: Recorders
    health: HealthWatch


def check(
    config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]
) -> tuple[CreditFlow | None, list[Problem]]:
    """Every problem that can be found without data, model or heavy import, and the credit flow if it has none."""
    problems = check_names(config, plugins, tables) + check_options(config, plugins)
    try:
        flow = build_flow(config, plugins)
    except RetrainError as error:
        return None, [*problems, *error.problems]
    return flow, problems + _check_entropy(config, plugins, flow)


def _check_entropy(config: Config, plugins: Plugins, flow: CreditFlow) -> list[Problem]:
    capabilities = declared_capabilities(config, plugins)
    if not flow.needs_entropy or capabilities is None or capabilities.provides_entropy:
        return []
    what = f"{flow.uncertainty.name!r} needs entropies, which backend {config.backend.backend!r} cannot give"
    place = config.place("algorithm.uncertainty_kind")
    return [Problem(where=place, what=what, fix='use uncertainty_kind = "surprisal", or backend = "local"')]


def assemble(
    config: Config, plugins: Plugins, flow: CreditFlow, seeds: Seeds, interrupts: Interrupts | None = None
) -> Parts:
    """Load tokenizer, data and model, in this order, and whatever the flow asks for."""
    stops = interrupts or Interrupts(grace_s=config.training.grace_s)
    context = PluginContext(
        config=config, seeds=seeds, plugins=plugins, tokenizer=load_tokenizer(config, plugins), check_stop=stops.check
    )
    pool, reward = _load_prompts(config, context)
    detector = build_detector(flow, context)
    controller = None
    if flow.controller:
        controller = build_part(Kind.CONTROLLER, flow.controller, "algorithm.transform_mode", context)
    pacer = None
    if config.value("backpressure.enabled", False):
        pacer = build_part(Kind.PACER, config.value("backpressure.pacer", "usl"), "backpressure.pacer", context)
    recorders = {name: build_part(Kind.RECORDER, name, path, context) for name, path in recorder_names(config).items()}
    monitors = {n: build_part(Kind.HEALTH_MONITOR, n, "health.monitors", context) for n in monitor_names(config)}
    options = backend_options(config)
    backend = build_part(Kind.BACKEND, config.backend.backend, "backend.backend", context, options, "backend.options")
    return Parts(
        config=config,
        plugins=plugins,
        seeds=seeds,
        flow=flow,
        tokenizer=context.tokenizer,
        pool=pool,
        reward=reward,
        backend=backend,
        controller=controller,
        pacer=pacer,
        detector=detector,
        recorders=Recorders(recorders),
        health=HealthWatch(monitors, policy=config.value("health.policy", "warn")),
    )


def build_detector(flow: CreditFlow, context: PluginContext) -> PlanningDetector | None:
    """The configured planning detector, if the flow asks for planning tokens."""
    if not flow.needs_planning:
        return None
    name = context.config.value("planning.detector", "regex")
    detector: PlanningDetector = build_part(Kind.PLANNING_DETECTOR, name, "planning.detector", context)
    return detector


def load_tokenizer(config: Config, plugins: Plugins) -> Any:
    """The model's tokenizer; ConfigError when the folder or hub id cannot be read."""
    model = config.model.model
    LOG.info("Loading tokenizer for %s ...", model)
    located = plugins.notify("retrain_locate_model", model=model) or model
    where = config.place("model.model")
    if ("/" not in located or located.startswith((".", "/", "~"))) and not Path(located).expanduser().is_dir():
        fix = "give a folder that holds a model, a hub id such as Qwen/Qwen3-4B-Instruct-2507, or builtin:tiny"
        raise ConfigError(Problem(where=where, what=f"no model folder {located!r}", fix=fix))
    from transformers import AutoTokenizer  # heavy: only now is a tokenizer really needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(located, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # transformers raises many kinds for the same two causes
        reason = " ".join(str(error).split())[:300]
        fix = "check the name and the network, or give a local folder with tokenizer files"
        raise ConfigError(
            Problem(where=where, what=f"no tokenizer could be loaded from {model!r}", why=reason, fix=fix)
        ) from error
    LOG.info("Loading vocabulary table...")
    LOG.info("Vocabulary table: %d entries", len(tokenizer))
    return tokenizer


def _load_prompts(config: Config, context: PluginContext) -> tuple[PromptPool, Reward]:
    LOG.info("Loading dataset...")
    options = config.data.options
    source = build_part(Kind.DATA_SOURCE, config.data.source, "data.source", context, options, "data.options")
    data: LoadedData = source.load()
    for note in data.notes:
        LOG.info("%s", printable(note))
    LOG.info("Loaded %d examples", len(data.examples))
    train, held_out = split_examples(data.examples, config, context.seeds)
    prompts = [Prompt(example=e, tokens_T=encode_prompt(e, context.tokenizer, config)) for e in (*train, *held_out)]
    LOG.info("Pre-encoded %d prompts", len(prompts))
    pool = PromptPool(train=tuple(prompts[: len(train)]), held_out=tuple(prompts[len(train) :]), seeds=context.seeds)
    if data.reward is not None and config.origin("reward.type") == DEFAULT_ORIGIN:
        return pool, data.reward  # the source's own verifier, unless the user asked for another
    if data.reward is not None:
        LOG.info("%s replaces the verifier that data source %r brings", config.place("reward.type"), config.data.source)
    return pool, build_part(Kind.REWARD, config.value("reward.type", "match"), "reward.type", context)
