"""Agents written elsewhere, in their own processes, whose calls to a model the policy answers.

Registers the environment `agent` and its metric.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import MetricSpec, PluginSpec


@hookimpl
def retrain_register_environments(register: Callable[[PluginSpec], None]) -> None:
    """`agent`: your own agent plays the tasks of `[data]`, and `[reward]` judges what it answers."""
    register(
        PluginSpec(
            name="agent",
            summary="your own agent, in its own process, whose calls to an OpenAI-compatible API the policy answers",
            factory="retrain.use.agents.player:make_agent",
            traits={"plays_data": True},
        )
    )


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """The field that only agents have."""
    meaning = "Answers of the policy that no agent received, because it had gone or asked again; they are not trained."
    return [MetricSpec(name="dropped_call_count", meaning=meaning, unit="requests", absent="without an agent")]
