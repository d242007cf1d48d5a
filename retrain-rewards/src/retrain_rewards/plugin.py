"""Registers the rewards, data sources and tables of this distribution; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.api import MetricSpec, PluginSpec, TableTraits, hookimpl

if TYPE_CHECKING:
    from retrain.api import Config, Diagnosis

Register = Callable[[PluginSpec], None]
REWARDS = (
    ("match", r"1 when the last \boxed{...} equals the reference as text, otherwise 0", "match:make_match"),
    ("math", "1 when the last box is an answer, mathematically equal to the reference", "math_reward:make_math"),
    ("code", "the program of a completion passes the tests of its example, in a sandbox", "code.reward:make_code"),
    ("judge", "a model behind an OpenAI-compatible API says how right an answer is", "judge_reward:make_judge"),
    ("custom", "a function of yours: [reward] custom_module, custom_function", "custom:make_custom"),
    ("none", "judges nothing, for a run that learns from a [teacher]", "match:make_none"),
)
ASK_FOR_PROGRAM = "Put your whole program into one ```python block."
SOURCES = (
    ("math", "competition mathematics, from the hub or a local folder", "math:Math", "math:MathOptions"),
    ("files", "your own JSONL, JSON, CSV or Parquet files", "files:Files", "table_source:TableOptions"),
    ("hub", "any data set of the Hugging Face hub by id, or a local copy", "files:Hub", "files:HubOptions"),
    ("gsm8k", "grade-school word problems, from the hub or a local copy", "files:Gsm8k", "files:HubOptions"),
    ("dapo-math", "DAPO-Math-17k, from the hub or a local copy", "files:DapoMath", "files:HubOptions"),
    ("deepscaler", "DeepScaleR's problems, from the hub or a local copy", "files:DeepScaler", "files:HubOptions"),
    ("countdown", "number puzzles with their own verifier", "files:Countdown", "files:HubOptions"),
    (
        "reasoning_gym",
        "any data set of reasoning-gym, with its own verifier",
        "reasoning_gym:ReasoningGym",
        "reasoning_gym:GymOptions",
    ),
    (
        "arithmetic",
        "sums, differences and products, from a seed",
        "arithmetic:Arithmetic",
        "arithmetic:ArithmeticOptions",
    ),
)
ENVIRONMENTS = (
    ("verifiers", "environments of the verifiers library, classic and v1", "verifiers_library.environment", ""),
    ("mcp", "the tasks of [data], with the tools of MCP servers", "mcp_tools", "mcp_settings:McpTable"),
    ("openenv", "an environment of an OpenEnv server, scored by its rewards", "openenv", "openenv:OpenEnvTable"),
)
METRICS = (
    ("judge_calls", "Requests sent to the judge, further tries included.", "requests"),
    ("judge_tokens_in", "Prompt tokens, as the judge's server counts them.", "tokens"),
    ("judge_tokens_out", "Tokens that the judge wrote.", "tokens"),
    ("judge_cost_usd", "Cost of these tokens, at [reward] judge_price_in and judge_price_out.", "USD"),
)


@hookimpl
def retrain_register_config_tables(register: Register) -> None:
    tables = (
        ("reward", "The scoring of completions.", "RewardTable"),
        ("environment", "Tasks from an environment.", "EnvironmentTable"),
    )
    for name, summary, model in tables:
        traits = TableTraits(flag_prefix=f"{name}_")
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_rewards.tables:{model}", traits=traits))
    default = TableTraits(extends=True, defaults={"source": "math"})
    register(PluginSpec(name="data", summary="The default source.", factory=None, traits=default))


@hookimpl
def retrain_register_rewards(register: Register) -> None:
    for name, summary, factory in REWARDS:
        traits = {"instruction": ASK_FOR_PROGRAM} if name == "code" else None
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_rewards.verifiers.{factory}", traits=traits))


@hookimpl
def retrain_register_data_sources(register: Register) -> None:
    folder = "retrain_rewards.sources"
    for name, summary, factory, options in SOURCES:
        register(PluginSpec(name=name, summary=summary, factory=f"{folder}.{factory}", params=f"{folder}.{options}"))


@hookimpl
def retrain_register_environments(register: Register) -> None:
    for name, summary, module, table in ENVIRONMENTS:
        factory = f"retrain_rewards.environments.{module}:make_{name}"
        params = f"retrain_rewards.environments.{table}" if table else None
        traits = {"plays_data": True} if name == "mcp" else None
        register(PluginSpec(name=name, summary=summary, factory=factory, params=params, traits=traits))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    absent = "without the reward judge"
    return [MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent) for name, meaning, unit in METRICS]


@hookimpl
def retrain_diagnose(config: Config | None) -> list[Diagnosis]:
    from retrain_rewards.doctor import diagnose

    return diagnose(config)
