"""The standard fields of a step's line, evaluation included, and their descriptions.

The standard fields of a step's line, added through the same hooks as any plugin's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.algorithm import Credit
    from retrain.kernel.contracts.views import EvalView, GroupsView, RunView
    from retrain.kernel.plugin_spec import MetricSpec


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """Every field that a run itself writes."""
    from retrain.observe.metrics.metric_names import described  # only the manual needs it

    return described()


@hookimpl
def retrain_extra_metrics(
    run: RunView | None, groups: GroupsView | None, credit: Credit | None, evaluation: EvalView | None
) -> Mapping[str, Any]:
    """The fields of a step or of an evaluation."""
    if evaluation is not None:
        from retrain.observe.metrics.evaluate import eval_metrics  # only an evaluation needs it

        return eval_metrics(evaluation.scores_EG, evaluation.correct_above, evaluation.clusters_E)
    return _step_metrics(run, groups, credit) if run and groups and credit else {}


def _step_metrics(run: RunView, groups: GroupsView, credit: Credit) -> Mapping[str, Any]:
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
