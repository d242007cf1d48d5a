from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from retrain.api import Kind, Plugins, resolve
from retrain.config.load import TableEntry, load_config
from retrain.errors import Problem

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
    assert resolve(plugins, Kind.REWARD, "match", where="test").owner.distribution == "retrain-rewards"


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys; from retrain.api import load_plugins; p = load_plugins(); assert not p.failures, p.failures;"
        "heavy = {'datasets', 'torch', 'pyarrow', 'pandas', 'reasoning_gym', 'math_verify', 'huggingface_hub'};"
        "print(*(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_importing_every_module_leaves_datasets_out() -> None:
    modules = ["tables", "match", *(f"sources.{m}" for m in ("arithmetic", "files", "math", "hub", "rows"))]
    modules += [f"reasoning_gym.{m}" for m in ("source", "verifier", "entries", "library", "guards")]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module('retrain_rewards.' + m)\n"
    code += "print(*({'datasets', 'reasoning_gym', 'torch', 'transformers'} & set(sys.modules)))"
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
    ("flag", "value", "text"),
    [
        ("--reward-judge-model", "some-model", "the judge reward is not built yet"),
        ("--reward-custom-module", "mine", "the custom reward is not built yet"),
        ("--reward-custom-function", "f", "the custom reward is not built yet"),
        ("--environment-id", "a/b", "verifiers environments are not built yet"),
        ("--environment-args", '{"split": "train"}', "verifiers environments are not built yet"),
        ("--environment-max-turns", "8", "verifiers environments are not built yet"),
        ("--environment-auto-install", "true", "verifiers environments are not built yet"),
        ("--environment-max-turns", "-2", "greater than or equal to -1"),
        ("--environment-args", "[1]", "valid dictionary"),
    ],
)
def test_what_is_not_built_or_wrong_is_refused_by_name(plugins: Plugins, flag: str, value: str, text: str) -> None:
    _, problems = resolve_config(plugins, f"{flag}={value}")
    assert len(problems) == 1
    assert text in str(problems[0])


@pytest.mark.parametrize("text", ["not json", "[1, 2]", "5", '{"a"', "[" * 100_000])
def test_environment_args_must_decode_to_an_object(text: str) -> None:
    from retrain_rewards.tables import EnvironmentTable

    assert EnvironmentTable.model_validate({"args": '{"split": "train"}'}).args == {"split": "train"}
    with pytest.raises(ValueError, match="JSON"):
        EnvironmentTable.model_validate({"args": text})
