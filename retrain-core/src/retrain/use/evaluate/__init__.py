"""Evaluation: the held-out examples and further sets, during a run and of whatever was trained.

Registers `[eval.sets]`, what evaluates a run, and the command `eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import MetricSpec, PluginSpec

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.tasks import Evaluation
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins
    from retrain.tasks.tasks import Tasks


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The keys of `[eval]` about further sets."""
    factory, summary = "retrain.kernel.config.plugin_tables:SetsKeys", "Further sets to evaluate on."
    register(PluginSpec(name="eval", summary=summary, factory=factory, traits=TableTraits(extends=True)))


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain eval`."""
    summary = "Evaluate a run, a checkpoint, an adapter or a model on held-out examples or other sets."
    register(PluginSpec(name="eval", summary=summary, factory="retrain.use.evaluate.command:command", traits="use"))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """The fields of further sets."""
    absent = "except on lines with an evaluation; without [eval.sets]"
    meaning = "What `eval_{field}` is to the held-out examples, for `[eval.sets.{set}]`."
    return [MetricSpec(name="eval_{set}_{field}", meaning=meaning, unit="", absent=absent)]


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    """Problems with `[eval.sets]`."""
    if not _has_sets(config):
        return ()
    from retrain.use.evaluate.sets import problems_of

    return problems_of(config, plugins)


@hookimpl
def retrain_explain(config: Config) -> Mapping[str, Any] | None:
    """What each further set is scored on, and how."""
    if not _has_sets(config):
        return None
    from retrain.use.evaluate.sets import read_sets

    return {"eval_sets": {each.name: each.described for each in read_sets(config)[0]}}


def _has_sets(config: Config) -> bool:
    from retrain.kernel.config.plugin_tables import SetsKeys  # imports pydantic, as `retrain --help` must not

    return bool(config.table("eval", SetsKeys).sets)


@hookimpl
def retrain_evaluation(context: PluginContext, tasks: Tasks) -> Evaluation | None:
    """The held-out examples and the sets of a run, if it has any."""
    if not tasks.pool.held_out and not _has_sets(context.config):
        return None
    from retrain.use.evaluate.evaluation import evaluation_of  # only a run that evaluates needs it

    return evaluation_of(context, tasks)
