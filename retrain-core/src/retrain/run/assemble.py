"""Builds the parts of a run from its configuration, in the order in which users want faults reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import CreditFlow
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Algorithm, Shaper
from retrain.kernel.contracts.backend import Backend, WarmUp
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Rollouts
from retrain.kernel.contracts.views import Pacer, PaceView
from retrain.kernel.errors import HookError, Problem, RetrainError, raised_at
from retrain.kernel.parts import Parts, Run, Sample, Serial
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.registry import Plugins, has_hooks
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group, Kind, SamplingParams
from retrain.run.backend import build_backend, import_backend
from retrain.run.interrupts import Interrupts
from retrain.run.steps.sampling_order import NamedSampler, PassOrder
from retrain.run.steps.staleness import AUTO, overlaps_training, steps_ahead
from retrain.run.steps.updates import Updates
from retrain.tasks.loading import load_tasks
from retrain.tasks.prompts import PromptPool
from retrain.tasks.scoring.trial import refuse_broken_rewards
from retrain.tasks.tasks import Tasks, closed_on_error
from retrain.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from retrain.run.steps.learned_order import LearnedOrder
    from retrain.run.steps.task_order import TaskOrder

LOG = logging.getLogger("retrain")


class FixedBatch:
    """The null pacer: every step takes `[training] batch_size` prompts, so that a seed reproduces its run."""

    is_repeatable = True

    def __init__(self, size: int) -> None:
        self._size = size

    def batch_size(self, step: int) -> int:
        return self._size

    def observe(self, view: PaceView) -> None: ...

    def metrics(self) -> Mapping[str, float | str | bool]:
        return {}

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


def assemble(
    config: Config,
    plugins: Plugins,
    flow: CreditFlow,
    seeds: Seeds,
    interrupts: Interrupts | None = None,
    *,
    saved: Mapping[str, Any] | None = None,
    check_tasks: Callable[[Tasks], None] | None = None,
) -> tuple[Parts, tuple[object, ...]]:
    """Load tokenizer, data and model, in this order, and build every other part that the configuration names.

    Returns the parts and the objects that watch the run: a shaper may implement their hooks too.

    With the `saved` state of a checkpoint, algorithm and pacer are restored before the model loads, because they may
    refuse it; so may `check_tasks` refuse the tasks.
    """
    stops = interrupts or Interrupts(grace_s=config.training.grace_s)
    if config.training.group_size == 1 and not flow.is_custom and not flow.advantage.compute_step:
        LOG.warning("group_size = 1: a group of one has nothing to compare, so no step will train")
    tokenizer = load_tokenizer(config, plugins)
    context = PluginContext(
        config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer, check_stop=stops.check, fail_run=stops.fail
    )
    # A recorder that is not installed is reported before anything slow happens.
    watchers = tuple(watcher for watcher in plugins.notify("retrain_watch_run", context=context) if watcher)
    tasks = load_tasks(context)
    with closed_on_error(tasks.verifier):
        if check_tasks:
            check_tasks(tasks)
        order = _prompt_order(tasks, config)
        select = _sampling(config, seeds, tasks)
        for each in tasks.each:
            refuse_broken_rewards(each.verifier, each.prompts, each.context.config)
        # The slowest import follows everything that can be refused without it.
        import_backend(config, plugins)
        tasks.verifier.start()
        for each in tasks.each:
            plugins.notify("retrain_tasks_loaded", context=each.context, tasks=each)
        warm_up = _warm_up(context, tasks)
        evaluation = plugins.notify("retrain_evaluation", context=context, tasks=tasks)
        if evaluation is None and config.eval.examples:
            LOG.warning("Nothing evaluates: the part of retrain-core that does is missing; reinstall retrain-core")
        algorithm = _algorithm(flow, context)
        pacer = _pacer(context)
        if saved and saved["algorithm"]:
            algorithm.restore(saved["algorithm"])
        if saved and saved["pacer"]:
            pacer.restore(saved["pacer"])
        backend = build_backend(context)
        order.draw_ahead(steps_ahead(config, backend))
        if flow.needs_greedy:
            from retrain.run.steps.greedy import greedy_first  # only an advantage that needs it loads it

            select = greedy_first(select, tasks, backend, context)
        given = plugins.notify("retrain_shape_rewards", context=context, backend=backend)
        shapers = [shaper for found in given for shaper in found or ()]
    parts = Parts(
        config=config,
        plugins=plugins,
        seeds=seeds,
        tokenizer=context.tokenizer,
        prompts=order,
        rollouts=_rollouts(tasks, backend, context),
        algorithm=algorithm,
        backend=backend,
        pacer=pacer,
        train=Updates(config, backend, seeds, stops).train,
        overlap=_arrangement(config, backend),
        select=select,
        shapers=tuple(map(NamedShaper, shapers)),
        warm_up=warm_up,
        evaluation=evaluation,
    )
    return parts, (*watchers, *filter(has_hooks, (*shapers, order)))


def _prompt_order(tasks: Tasks, config: Config) -> PassOrder | LearnedOrder | TaskOrder:
    orders = [_order_of(each.pool, each.context) for each in tasks.each]
    if not tasks.several:
        return orders[0]
    from retrain.run.steps.task_order import TaskOrder  # only several tasks have shares

    return TaskOrder(tasks.several, orders, config)


def _order_of(pool: PromptPool, context: PluginContext) -> PassOrder | LearnedOrder:
    key, data = "data.sampler", context.config.data
    examples = tuple(prompt.example for prompt in pool.train)

    def build() -> NamedSampler:
        sampler = build_part(
            Kind.SAMPLER, data.sampler, key, context, data.sampler_params, "data.sampler_params", [examples]
        )
        return NamedSampler(data.sampler, context.config.place(key), sampler)

    sampler = build()
    if sampler.in_passes:
        return PassOrder(pool, sampler)
    # Only a sampler that learns needs its outcomes kept.
    from retrain.run.steps.learned_order import LearnedOrder

    return LearnedOrder(pool, build)


def _warm_up(context: PluginContext, tasks: Tasks) -> WarmUp | None:
    if not context.config.sft.steps:
        return None
    # Imported here because only a run with [sft] warms up.
    from retrain.credit.warm_up import supervised

    return supervised(context, tasks)


def _arrangement(config: Config, backend: Backend) -> Callable[[Run, Sample], Serial]:
    """Order of sampling and training in a run with this backend; ConfigError for more overlap than it supports."""
    most = config.training.max_staleness
    if most == 0 or (most == AUTO and not overlaps_training(backend)):
        return lambda run, sample: Serial(run.parts.backend, run.parts.train, sample)
    # Only a run that overlaps pays for threads and queues.
    from retrain.run.steps.overlapped import arrangement

    return arrangement(config, backend)


def _pacer(context: PluginContext) -> Pacer:
    config = context.config
    if not config.backpressure.enabled:
        return FixedBatch(config.training.batch_size)
    pacer: Pacer = build_part(Kind.PACER, config.backpressure.pacer, "backpressure.pacer", context)
    return pacer


def _algorithm(flow: CreditFlow, context: PluginContext) -> Algorithm:
    algorithm = build_algorithm(flow, context)
    if context.config.training.control:
        # Few runs are controls, so their module loads on demand.
        from retrain.run.steps.controls import controlled_algorithm

        algorithm = controlled_algorithm(algorithm, context.config)
    return algorithm


def _sampling(config: Config, seeds: Seeds, tasks: Tasks) -> Callable[[Sample], Sample]:
    """Wrap the sampling of a step as `[training] control`, `overlong` and `refill` require."""
    training, ways = config.training, list[Callable[[Sample], Sample]]()
    if training.control:
        from retrain.run.steps.controls import controlled_sampling  # only a control loads it

        ways.append(controlled_sampling(config, seeds, tasks))
    if training.overlong == "drop" or training.refill:
        from retrain.run.steps.selection import selection  # only such a run loads it

        ways.append(selection(config))
    return lambda sample: reduce(lambda inner, way: way(inner), ways, sample)


def _rollouts(tasks: Tasks, backend: Backend, context: PluginContext) -> Rollouts:
    training = context.config.training
    params = SamplingParams(
        max_tokens=training.max_tokens, temperature=training.temperature, entropy=backend.capabilities.provides_entropy
    )
    return tasks.verifier.rollouts(backend, context, params, tasks.context_length)


FIX = "correct that plugin, or leave it out with RETRAIN_BLOCK=distribution"


class NamedShaper:
    """A shaper whose errors and faulty results become a HookError that says which class of which module it is."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper

    def __str__(self) -> str:
        kind = type(self._shaper)
        return f"shaper {kind.__module__}.{kind.__qualname__}"

    def shape(self, step: int, groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """Return the shaper's result, provided that it is the same groups in the same order, and fields."""
        try:
            result = self._shaper.shape(step, groups)
        except RetrainError:
            raise
        except Exception as error:
            what = f"{self} raised {type(error).__name__}: {error}{raised_at(error)}"
            raise HookError(Problem(code="plugin.raised", what=what, fix=FIX)) from error
        match result:
            case [[*shaped], Mapping() as fields] if list(map(_example, shaped)) == list(map(_example, groups)):
                return tuple(shaped), fields
        what = f"{self} did not return its {len(groups)} groups in their order, and a dict of fields"
        fix = "return (tuple of all groups, dict of fields)"
        raise HookError(Problem(code="plugin.bad-result", what=what, fix=fix))


def _example(group: Any) -> int:
    return id(getattr(group, "example", None))
