"""Credit assignment: from the scores of a group to one number per sampled token; KL, a teacher, a supervised warm-up.

Begin with `flow.py` (the parts that the file names) and `pipeline.py` (their work on a group). Imports nothing of the
run that calls it. Registers `[kl]`, `[entropy]`, `[sft]`, `[teacher]` and `[distil]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.backend import Backend
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.tasks import LoadedTasks
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins

TABLES = (  # name, model, summary
    ("kl", "KlTable", "KL divergence from the model that training began with."),
    ("entropy", "EntropyTable", "Terms against a collapse of the entropy."),
    ("sft", "SftTable", "Training on given answers before the first step."),
    ("teacher", "TeacherTable", "A model to learn from, token by token."),
    ("distil", "DistilTable", "The policy as its own teacher, with more in its context."),
)


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    for name, model, summary in TABLES:
        traits = TableTraits(flag_prefix=f"{name}_")
        factory = f"retrain.kernel.config.plugin_tables:{model}"
        register(PluginSpec(name=name, summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_describe_metrics() -> Sequence[MetricSpec]:
    from retrain.credit.metric_names import METRICS

    return METRICS


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> list[Problem]:
    from retrain.credit.flow import build_flow
    from retrain.kernel.config.plugin_tables import DistilTable, EntropyTable, KlTable, SftTable, TeacherTable
    from retrain.kernel.errors import RetrainError
    from retrain.tasks.scoring.build import has_verifier

    try:
        flow = build_flow(config, plugins)
    except RetrainError:  # reported by the check of the flow
        flow = None
    tables = (config.kl, config.entropy, config.sft, config.teacher, config.distil)
    is_default = tables == (KlTable(), EntropyTable(), SftTable(), TeacherTable(), DistilTable())
    if is_default and (flow is None or (flow.needs_verdict and has_verifier(config))):
        return []
    from retrain.credit.table_checks import table_problems  # only a run with one of these tables needs it

    return table_problems(config, plugins, flow)


@hookimpl
def retrain_explain(config: Config) -> dict[str, str]:
    table = config.teacher
    if not table.is_set:
        return {}
    from retrain.kernel.config.plugin_tables import HERE

    model = table.model or (config.model.model if table.engine == HERE else "its only model")
    adapter = f" with the adapter in {table.adapter}" if table.adapter else ""
    return {"teacher": f"{model}{adapter}, engine {table.engine}"}


@hookimpl
def retrain_tasks_loaded(context: PluginContext, tasks: LoadedTasks) -> None:
    if context.config.distil.teacher:
        from retrain.credit.self_teacher import require_privileged

        require_privileged(tasks, context)


@hookimpl
def retrain_shape_rewards(context: PluginContext, backend: Backend) -> Sequence[Shaper]:
    from retrain.credit.flow import build_flow
    from retrain.credit.kl import shaper_of

    flow = build_flow(context.config, context.plugins)
    shapers: list[Shaper] = []
    if context.config.teacher.is_set:
        from retrain.credit.teacher import open_teacher  # only a run with a teacher needs it

        shapers.append(open_teacher(context))
    elif context.config.distil.teacher:
        from retrain.credit.self_teacher import SelfTeacherShaper

        shapers.append(SelfTeacherShaper(context, backend))
    if flow.needs_squared_probs:
        from retrain.credit.squared_probs import SquaredProbs  # only such an advantage needs it

        shapers.append(SquaredProbs(backend=backend, temperature=context.config.training.temperature))
    by_token, needs_verdict = flow.needs_token_rewards, flow.needs_verdict
    return [*shapers, *shaper_of(context.config, backend, by_token=by_token, needs_verdict=needs_verdict)]
