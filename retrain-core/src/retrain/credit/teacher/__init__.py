"""On-policy distillation: another model rates every sampled token by the likelihood that it gives it.

Registers `[teacher]`, and opens the teacher of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins

METRICS = (
    (
        "teacher_kl_mean",
        "Mean over action tokens of k3 between policy and teacher: an estimate >= 0 of the KL.",
        "nats",
    ),
    ("teacher_kl_k1_mean", "Mean of log p - log p_teacher: the KL too, of either sign; minus the mean reward.", "nats"),
    ("teacher_time_s", "Time that the teacher took for its log-probabilities, part of step_time_s.", "s"),
)


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    summary, factory = "A model to learn from, token by token.", "retrain.kernel.config.plugin_tables:TeacherTable"
    traits = TableTraits(flag_prefix="teacher_")
    register(PluginSpec(name="teacher", summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    absent = "without [teacher]; on a rejected step"
    return [MetricSpec(name=name, meaning=text, unit=unit, absent=absent) for name, text, unit in METRICS]


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    from retrain.credit.flow import build_flow
    from retrain.kernel.errors import RetrainError
    from retrain.tasks.scoring.build import has_verifier

    try:
        flow = build_flow(config, plugins)
    except RetrainError:  # reported by the check of the flow
        return []
    table = config.teacher
    is_named = table.is_set or table.url or table.api_key_env
    if not is_named and flow.needs_verdict and has_verifier(config):
        return []
    from retrain.credit.teacher.check import problems_of

    return list(problems_of(config, plugins, flow))


@hookimpl
def retrain_explain(config: Config) -> Mapping[str, Any] | None:
    if not config.teacher.is_set:
        return None
    from retrain.kernel.config.plugin_tables import HERE

    table = config.teacher
    model = table.model or (config.model.model if table.engine == HERE else "its only model")
    adapter = f" with the adapter in {table.adapter}" if table.adapter else ""
    return {"teacher": f"{model}{adapter}, engine {table.engine}"}


@hookimpl
def retrain_shape_rewards(context: PluginContext) -> Sequence[Shaper] | None:
    if not context.config.teacher.is_set:
        return None
    from retrain.credit.teacher.shaper import open_teacher

    return [open_teacher(context)]
