"""Uses of a trained model: evaluate, chat, sample, serve and export it; the gateway for agents.

Begin with `retrain.run.subject` (finds a run, checkpoint or model by name) and `retrain.run.opened` (loads it). Imports
nothing of campaigns, and of the packages that read finished runs only the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.tasks import Evaluation
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins
    from retrain.tasks.tasks import Tasks

COMMANDS = (
    ("chat", "Talk to a run, an adapter or a model.", "chat_command"),
    ("eval", "Evaluate a run, a checkpoint or a model on held-out examples or other sets.", "evaluate.command"),
    ("sample", "Sample completions of prompts from a file.", "sample_command"),
    ("export", "Write a trained model for transformers, GGUF, MLX or vLLM, or push it to the hub.", "export_command"),
    ("serve", "Serve a run, an adapter or a model to any client of the OpenAI API.", "serve_command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    for name, summary, module in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.use.{module}:command", traits="use"))


@hookimpl
def retrain_register_environments(register: Callable[[PluginSpec], None]) -> None:
    summary = "your own agent, in a separate process; the policy answers its calls to an OpenAI-compatible API"
    factory = "retrain.use.agents.player:make_agent"
    register(PluginSpec(name="agent", summary=summary, factory=factory, traits={"plays_data": True}))


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    factory, summary = "retrain.kernel.config.plugin_tables:SetsKeys", "Further sets to evaluate on."
    register(PluginSpec(name="eval", summary=summary, factory=factory, traits=TableTraits(extends=True)))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    dropped = "Answers of the policy that the agent did not receive (gone, or a retry); they are not trained."
    of_sets = "As `eval_{field}` for the held-out examples, for `[eval.sets.{set}]`."
    absent = "except on lines with an evaluation; without [eval.sets]"
    return [
        MetricSpec(name="dropped_call_count", meaning=dropped, unit="requests", absent="without an agent"),
        MetricSpec(name="eval_{set}_{field}", meaning=of_sets, unit="", absent=absent),
    ]


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    if not _has_sets(config):
        return ()
    from retrain.use.evaluate.sets import problems_of

    return problems_of(config, plugins)


@hookimpl
def retrain_explain(config: Config) -> Mapping[str, Any] | None:
    if not _has_sets(config):
        return None
    from retrain.use.evaluate.sets import read_sets

    return {"eval_sets": {each.name: each.described for each in read_sets(config)[0]}}


@hookimpl
def retrain_evaluation(context: PluginContext, tasks: Tasks) -> Evaluation | None:
    if not tasks.pool.held_out and not _has_sets(context.config):
        return None
    from retrain.use.evaluate.evaluation import evaluation_of  # only a run that evaluates needs it

    return evaluation_of(context, tasks)


def _has_sets(config: Config) -> bool:
    # Imports pydantic, and `retrain --help` must not wait for it.
    from retrain.kernel.config.plugin_tables import SetsKeys

    return bool(config.table("eval", SetsKeys).sets)
