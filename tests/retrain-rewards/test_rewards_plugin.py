from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from retrain.api import Kind, Plugins, resolve
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.errors import Problem
from retrain_rewards.verifiers.custom import CustomReward
from retrain_rewards.verifiers.judge_reward import JudgeReward
from retrain_rewards.verifiers.match import MatchReward
from retrain_rewards.verifiers.math_reward import MathReward
from tests.kit.tables import cells, pairs

SOURCES = ("arithmetic", "files", "math", "reasoning_gym")


def resolve_config(plugins: Plugins, *arguments: str) -> tuple[Any, list[Problem]]:
    entries = {e.spec.name: e.spec for e in plugins.registered(Kind.CONFIG_TABLE)}
    tables = {name: TableEntry(model=spec.load(), traits=spec.traits) for name, spec in entries.items()}  # type: ignore[arg-type]
    return load_config(None, tables=tables, arguments=arguments)


def test_every_part_is_registered_and_loads(plugins: Plugins) -> None:
    assert not plugins.failures
    for name in SOURCES:
        found = resolve(plugins, Kind.DATA_SOURCE, name, where="test")
        assert found.owner.distribution == "retrain-rewards"
        assert found.params is not None
        assert found.params.model_config["extra"] == "forbid"
    for name in ("match", "math", "code", "judge", "custom"):
        assert resolve(plugins, Kind.REWARD, name, where="test").owner.distribution == "retrain-rewards"


def test_match_and_math_compare_with_the_reference_and_the_others_need_not() -> None:
    assert MatchReward.needs_reference
    assert MathReward.needs_reference
    assert not any(hasattr(reward, "needs_reference") for reward in (JudgeReward, CustomReward))


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys; from retrain.api import load_plugins; p = load_plugins(); assert not p.failures, p.failures;"
        "heavy = {'datasets', 'torch', 'pyarrow', 'pandas', 'reasoning_gym', 'math_verify', 'huggingface_hub'};"
        "print(*(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_importing_every_module_leaves_datasets_out() -> None:
    modules = cells("""
        tables  answers.size  sandbox.inside  sources.arithmetic  sources.files  sources.math  sources.rows
        sources.reasoning_gym  sources.reasoning_gym_library  verifiers.match  verifiers.math_reward
        verifiers.custom  verifiers.code.reward  verifiers.judge_reward  verifiers.judge_client
        environments.verifiers_library.environment  environments.mcp_tools  environments.openenv
    """)
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module('retrain_rewards.' + m)\n"
    heavy = {"datasets", "reasoning_gym", "torch", "transformers", "openai", "math_verify", "sympy", "verifiers", "mcp"}
    code += f"print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_tables_have_the_documented_defaults_and_flags(plugins: Plugins) -> None:
    config, problems = resolve_config(plugins, "--reward-type", "match", "--environment-args", "{}")
    assert not problems
    assert config.value("reward.custom_function", "") == "score"
    assert config.value("environment.max_turns", 0) == -1
    assert config.value("environment.args", None) == {}
    assert config.value("environment.provider", None) == ""


@pytest.mark.parametrize(
    ("flag", "value"),
    pairs("""
        reward-judge-model => m  reward-custom-module => mine  reward-judge-api-key-env => sk-planted
        reward-judge-temperature => -2  reward-judge-concurrency => 0  reward-judge-price-in => nan
        reward-weights => {"match": 0.0}  reward-weights => {"": 1.0}  reward-weights => {"match": -1.0}
        reward-weights => {"match": NaN}  reward-weights => {"match": 1e999}  reward-weights => {"match": true}
        reward-weights => {"match": "1"}  reward-weights => match  environment-id => a/b
        environment-provider => verifiers  environment-max-turns => -2  environment-args => [1]
    """),
)
def test_a_wrong_value_is_refused_by_name(plugins: Plugins, flag: str, value: str) -> None:
    _, (problem,) = resolve_config(plugins, f"--{flag}={value}")
    named = "[environment] id" if flag == "environment-provider" else f"--{flag}"
    assert named in problem.where
    assert "sk-planted" not in str(problem)


def test_weights_replace_the_type(plugins: Plugins) -> None:
    config, problems = resolve_config(plugins, '--reward-weights={"math": 1, "my.own": -0.5}')
    assert not problems
    assert config.value("reward.weights", {}) == {"math": 1.0, "my.own": -0.5}
    assert not resolve_config(plugins, '--reward-weights={"judge": 1}', "--reward-judge-model=m")[1]
    assert not resolve_config(plugins, "--set", "reward.weights.math=2", "--reward-type=match")[1]  # as config.toml
    _, (problem,) = resolve_config(plugins, '--reward-weights={"math": 1}', "--reward-type=judge")
    assert problem.where == "--reward-weights [reward] weights"


def test_a_reward_of_somebody_else_may_read_any_key(plugins: Plugins) -> None:
    assert not resolve_config(plugins, "--reward-type=my.own", "--reward-judge-model=m")[1]


@pytest.mark.parametrize("text", ["not json", "[1, 2]", "5", '{"a"', "[" * 100_000])
def test_environment_args_must_decode_to_an_object(text: str) -> None:
    from retrain_rewards.tables import EnvironmentTable

    assert EnvironmentTable.model_validate({"args": '{"split": "train"}'}).args == {"split": "train"}
    with pytest.raises(ValueError, match="JSON"):
        EnvironmentTable.model_validate({"args": text})
