"""The standard fields of a step's line and of an evaluation, added through the same hooks as any plugin's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.algorithm import Credit
    from retrain.kernel.contracts.views import EvalView, GroupsView, RunView
    from retrain.kernel.declared import MetricSpec


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    from retrain.observe.metrics.metric_names import described  # only the manual needs it

    return described()


@hookimpl
def retrain_extra_metrics(
    run: RunView | None, groups: GroupsView | None, credit: Credit | None, evaluation: EvalView | None
) -> Mapping[str, Any]:
    if evaluation is not None:
        from retrain.observe.metrics.evaluate import eval_metrics  # only an evaluation needs it

        return eval_metrics(evaluation.scores_EG, evaluation.correct_above, evaluation.clusters_E)
    from retrain.observe.metrics.fields import step_metrics  # only a run needs them

    return step_metrics(run.config, groups.groups, credit) if run and groups and credit else {}
