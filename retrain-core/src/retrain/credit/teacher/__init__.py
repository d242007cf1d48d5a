"""On-policy distillation: another model says of every sampled token how likely it would have been.

Registers `[teacher]`, refuses what does not go with it, and opens the teacher of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import MetricSpec, PluginSpec

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
    """The table `[teacher]`."""
    summary, factory = "A model to learn from, token by token.", "retrain.kernel.config.plugin_tables:TeacherTable"
    traits = TableTraits(flag_prefix="teacher_")
    register(PluginSpec(name="teacher", summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """The `teacher_*` fields."""
    absent = "without [teacher]; on a rejected step"
    return [MetricSpec(name=name, meaning=text, unit=unit, absent=absent) for name, text, unit in METRICS]


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    """What does not go with a teacher, and with a run that needs no verdicts."""
    from retrain.credit.teacher.table import problems_of

    return problems_of(config, plugins)


@hookimpl
def retrain_explain(config: Config) -> Mapping[str, Any] | None:
    """Who teaches, if anybody does."""
    from retrain.credit.teacher.table import has_teacher
    from retrain.kernel.config.plugin_tables import HERE

    if not has_teacher(config):
        return None
    table = config.teacher
    model = table.model or (config.model.model if table.engine == HERE else "its only model")
    adapter = f" with the adapter in {table.adapter}" if table.adapter else ""
    return {"teacher": f"{model}{adapter}, engine {table.engine}"}


@hookimpl
def retrain_shape_rewards(context: PluginContext) -> Sequence[Shaper] | None:
    """The teacher of a run, if it has one."""
    from retrain.credit.teacher.shaper import open_teacher  # only a run needs them
    from retrain.credit.teacher.table import has_teacher

    return [open_teacher(context)] if has_teacher(context.config) else None
