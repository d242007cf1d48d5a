"""Registers the rewards, data sources and tables of this distribution; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable

from retrain.api import PluginSpec, TableTraits, hookimpl

Register = Callable[[PluginSpec], None]


@hookimpl
def retrain_register_config_tables(register: Register) -> None:
    """`[reward]` and `[environment]`."""
    for name, model in (("reward", "RewardTable"), ("environment", "EnvironmentTable")):
        register(
            PluginSpec(
                name=name,
                summary={"reward": "How completions are scored.", "environment": "Tasks from an environment."}[name],
                factory=f"retrain_rewards.tables:{model}",
                traits=TableTraits(flag_prefix=f"{name}_"),
            )
        )


@hookimpl
def retrain_register_rewards(register: Register) -> None:
    """`match`."""
    register(
        PluginSpec(
            name="match",
            summary=r"1 when the last \boxed{...} equals the reference as text, else 0",
            factory="retrain_rewards.match:make_match",
        )
    )


@hookimpl
def retrain_register_data_sources(register: Register) -> None:
    """`math`, `files`, `reasoning_gym`, `arithmetic`."""
    sources = (
        ("math", "competition mathematics, from the hub or a local folder", "sources.math", "MathOptions"),
        ("files", "your own JSONL, JSON, CSV or Parquet files", "sources.files", "FilesOptions"),
        ("reasoning_gym", "any data set of reasoning-gym, with its own verifier", "reasoning_gym.source", "GymOptions"),
        ("arithmetic", "sums, differences and products, made on the spot", "sources.arithmetic", "ArithmeticOptions"),
    )
    for name, summary, module, options in sources:
        register(
            PluginSpec(
                name=name,
                summary=summary,
                factory=f"retrain_rewards.{module}:make_{name}",
                params=f"retrain_rewards.{module}:{options}",
            )
        )
