"""`[reward] shadow`, a second verifier that is never trained, and the signs that a reward is gamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.plugin_tables import ShadowKeys
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.report import ReportSection
    from retrain.kernel.contracts.views import EvalView, GroupsView, RunView
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    factory, summary = "retrain.kernel.config.plugin_tables:ShadowKeys", "A second verifier that is never trained."
    register(PluginSpec(name="reward", summary=summary, factory=factory, traits=TableTraits(extends=True)))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    from retrain.observe.gaming.shadow import FIELDS

    return [MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent) for name, meaning, unit, absent in FIELDS]


def _keys(config: Config) -> ShadowKeys:
    from retrain.kernel.config.plugin_tables import ShadowKeys  # imports pydantic, as `retrain --help` must not

    return config.table("reward", ShadowKeys)


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    keys = _keys(config)
    if not keys.shadow and not keys.shadow_params:
        return ()
    from retrain.observe.gaming.shadow import shadow_problems

    return [*shadow_problems(config, plugins)]


@hookimpl
def retrain_watch_run(context: PluginContext) -> object:
    from retrain.observe.gaming.suspicion import GamingWatch  # only a run needs it

    return GamingWatch(context)


@hookimpl
def retrain_extra_metrics(
    run: RunView | None, groups: GroupsView | None, evaluation: EvalView | None
) -> Mapping[str, Any]:
    if run is not None and not _keys(run.config).shadow and not run.config.data.tasks:
        return {}
    from retrain.observe.gaming.shadow import eval_fields, fields_of_tasks  # only a shadow needs it

    if evaluation is not None:
        return eval_fields(evaluation.scores_EG, evaluation.correct_above)
    return fields_of_tasks(run.config.data.task_names, groups.groups) if run and groups else {}


@hookimpl
def retrain_report_sections(run: RunView) -> Mapping[str, str | ReportSection] | None:
    if not _keys(run.config).shadow:
        return None
    from retrain.observe.gaming.shadow import alarm_text, report_section  # only a report needs them

    alarms = alarm_text(run.folder)
    return {**(report_section(run) or {}), **({"Gaming": alarms} if alarms else {})}
