"""The standard fields of a step's line, added through the same hooks as any plugin's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.algorithm import Credit
    from retrain.kernel.contracts.views import GroupsView, RunView
    from retrain.kernel.plugin_spec import MetricSpec
    from retrain.kernel.types import Score


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """Every field that a run itself writes."""
    from retrain.observe.metrics.metric_names import described  # only the manual needs it

    return described()


@hookimpl
def retrain_extra_metrics(run: RunView, groups: GroupsView, credit: Credit) -> Mapping[str, Any]:
    """Rewards, groups and lengths of a step; with `[training] refill` and `overlong` also what was left out."""
    from retrain.observe.metrics import fields  # only a run needs them
    from retrain.tasks.scoring.build import has_verifier

    scored = groups.groups
    found = {
        **(fields.reward_metrics(scored) if has_verifier(run.config) else {}),
        **fields.group_metrics(credit.statuses_P),
        **fields.length_metrics(scored),
    }
    if run.config.training.refill:
        found |= fields.refill_metrics(scored, credit)
    if run.config.training.overlong == "drop":
        found |= fields.overlong_metrics(scored)
    return found


@hookimpl
def retrain_eval_metrics(
    scores_EG: Sequence[Sequence[Score]], correct_above: float, clusters_E: Sequence[str]
) -> Mapping[str, Any]:
    """Correct rate with its interval, rewards, and pass@k."""
    from retrain.observe.metrics.evaluate import eval_metrics  # only a run needs it

    return eval_metrics(scores_EG, correct_above, clusters_E)
