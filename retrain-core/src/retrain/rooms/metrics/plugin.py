"""The standard fields of a step's line, added through the same hooks as any plugin's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.algorithm import Credit
    from retrain.kernel.contracts.views import GroupsView
    from retrain.kernel.plugins.spec import MetricSpec
    from retrain.kernel.types import Score


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """Every field that a run itself writes."""
    from retrain.rooms.metrics.metric_names import described  # only the manual needs it

    return described()


@hookimpl
def retrain_extra_metrics(groups: GroupsView, credit: Credit) -> Mapping[str, Any]:
    """Rewards, groups and lengths of a step."""
    from retrain.rooms.metrics.fields import group_metrics, length_metrics, reward_metrics  # only a run needs it

    scored = groups.groups
    return {**reward_metrics(scored), **group_metrics(credit.statuses_P), **length_metrics(scored)}


@hookimpl
def retrain_eval_metrics(scores_EG: Sequence[Sequence[Score]], correct_above: float) -> Mapping[str, Any]:
    """Correct rate with its interval, rewards, and pass@k."""
    from retrain.rooms.metrics.evaluate import eval_metrics  # only a run needs it

    return eval_metrics(scores_EG, correct_above)
