"""Servers that sample for a run: vLLM, SGLang, MLX, MAX, any OpenAI-compatible one, and fleets of them.

Begin with `engine.py`: a backend calls it. `policy_check.py` compares a server with the policy, `keeper.py` watches its
health. Imports nothing of campaigns; engine `pytorch` lives in retrain-local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.declared import EngineTraits, MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins

ENGINES = {
    "vllm": "A vLLM server: token ids in both directions, adapters loaded while it runs.",
    "sglang": "An SGLang server, through its native /generate.",
    "mlx": "The server of MLX-LM, on Apple silicon or a CPU.",
    "max": "A MAX server (max serve): token ids recovered from texts, exactly or not at all.",
    "openai": "Any server with /v1/completions that returns its tokens and accepts PEFT adapters.",
}
TEACHERS = ("vllm", "sglang")  # whose servers give log-probabilities of given tokens
NO_SERVER = "unless [inference] engine is a server; on a rejected step"
NO_PROBE = f"{NO_SERVER}; where the training model is in another process; before the first probe"
NOT_RECOMPUTED = 'unless [inference] logprobs = "trainer"; on a rejected step'
PROBED = "Mean |log p of the server - log p of the trainer| on the prompts of the last probe."
RECOMPUTED = "Mean |log p of the trainer - log p of the server| over the step's recomputed tokens."
METRICS = (
    ("inference_retries", "Requests that were retried.", "requests", NO_SERVER),
    ("inference_moved", "Requests that were repeated on another server.", "requests", NO_SERVER),
    ("inference_servers", "Servers that had the newest policy when the line was written.", "", NO_SERVER),
    ("inference_reloads", "Times that a server was given back a policy that it had lost.", "", NO_SERVER),
    ("probe_gap_mean", PROBED, "nats", NO_PROBE),
    ("probe_gap_max", "Largest such gap.", "nats", NO_PROBE),
    ("engine_gap_mean", RECOMPUTED, "nats", NOT_RECOMPUTED),
    ("engine_gap_p99", "99th percentile of that gap.", "nats", NOT_RECOMPUTED),
    ("engine_gap_max", "Largest such gap.", "nats", NOT_RECOMPUTED),
)


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    traits = TableTraits(flag_prefix="inference_")
    factory = "retrain.kernel.config.plugin_tables:InferenceTable"
    register(PluginSpec(name="inference", summary="Which engine samples completions.", factory=factory, traits=traits))


@hookimpl
def retrain_register_inference_engines(register: Callable[[PluginSpec], None]) -> None:
    for name, summary in ENGINES.items():
        factory = f"retrain.engines.{name}:create_engine"
        teacher = f"retrain.engines.{name}:open_teacher" if name in TEACHERS else None
        traits = EngineTraits(honours=frozenset({"logprobs"}), open_teacher=teacher)
        register(PluginSpec(name=name, summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> list[Problem]:
    if config.teacher.engine not in ENGINES and not config.inference.model_dump(exclude_defaults=True):
        return []
    from retrain.engines.table import teacher_problems, unsupported_keys

    return [*unsupported_keys(config, plugins, ENGINES), *teacher_problems(config)]


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    return [MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent) for name, meaning, unit, absent in METRICS]
