"""What this distribution registers, and what it tells the doctor."""

import subprocess
import sys

import pytest

from retrain.api import Config, Kind, resolve
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.config.schema import DataTable
from retrain_rewards import doctor
from retrain_rewards.doctor import diagnose
from retrain_rewards.sandbox.sandbox import Sandbox
from retrain_rewards.tables import EnvironmentTable, RewardTable
from retrain_rewards.verifiers.custom import CustomReward
from retrain_rewards.verifiers.judge_reward import JudgeReward
from retrain_rewards.verifiers.match import MatchReward
from retrain_rewards.verifiers.math_reward import MathReward
from tests.kit.judge_server import serving
from tests.kit.tables import cells, pairs


def resolve_config(plugins, *arguments):
    entries = {e.spec.name: e.spec for e in plugins.registered(Kind.CONFIG_TABLE)}
    tables = {name: TableEntry(model=spec.load(), traits=spec.traits) for name, spec in entries.items()}
    return load_config(None, tables=tables, arguments=arguments)


def test_every_part_is_registered_and_loads(plugins):
    assert not plugins.failures
    for name in ("arithmetic", "files", "math", "reasoning_gym"):
        found = resolve(plugins, Kind.DATA_SOURCE, name, where="test")
        assert found.owner.distribution == "retrain-rewards"
        assert found.params is not None
        assert found.params.model_config["extra"] == "forbid"
    for name in ("match", "math", "code", "judge", "custom"):
        assert resolve(plugins, Kind.REWARD, name, where="test").owner.distribution == "retrain-rewards"
    assert [each.needs_reference for each in (MatchReward, MathReward)] == [True, True]
    assert not any(hasattr(reward, "needs_reference") for reward in (JudgeReward, CustomReward))


def test_importing_every_module_leaves_datasets_out():
    modules = cells("""
        tables  answers.size  sandbox.inside  sources.arithmetic  sources.files  sources.math  sources.rows
        sources.reasoning_gym  sources.reasoning_gym_library  verifiers.match  verifiers.math_reward
        verifiers.custom  verifiers.code.reward  verifiers.judge_reward  verifiers.judge_client
        environments.verifiers_library.environment  environments.mcp_tools  environments.openenv
    """)
    registering = "from retrain.api import load_plugins; p = load_plugins(); assert not p.failures, p.failures"
    code = (
        f"import sys, importlib; {registering}\nfor m in {modules}: importlib.import_module('retrain_rewards.' + m)\n"
    )
    heavy = {"datasets", "reasoning_gym", "torch", "transformers", "openai", "math_verify", "sympy", "verifiers", "mcp"}
    code += f"print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


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
def test_a_wrong_value_is_refused_by_name(plugins, flag, value):
    _, (problem,) = resolve_config(plugins, f"--{flag}={value}")
    named = "[environment] id" if flag == "environment-provider" else f"--{flag}"
    assert named in problem.where
    assert "sk-planted" not in str(problem)


def test_weights_replace_the_type(plugins):
    config, problems = resolve_config(plugins, '--reward-weights={"math": 1, "my.own": -0.5}')
    assert not problems
    assert config.value("reward.weights", {}) == {"math": 1.0, "my.own": -0.5}
    defaults = ("reward.custom_function", "environment.max_turns", "environment.provider")
    assert [config.value(name, None) for name in defaults] == ["score", -1, ""]
    assert not resolve_config(plugins, "--reward-type=my.own", "--reward-judge-model=m")[1], "it may read any key"
    assert not resolve_config(plugins, '--reward-weights={"judge": 1}', "--reward-judge-model=m")[1]
    assert not resolve_config(plugins, "--set", "reward.weights.math=2", "--reward-type=match")[1]  # as config.toml
    _, (problem,) = resolve_config(plugins, '--reward-weights={"math": 1}', "--reward-type=judge")
    assert problem.where == "--reward-weights [reward] weights"


@pytest.mark.parametrize("text", ["not json", "[1, 2]", "5", '{"a"', "[" * 100_000])
def test_environment_args_must_decode_to_an_object(text):
    from retrain_rewards.tables import EnvironmentTable

    assert EnvironmentTable.model_validate({"args": '{"split": "train"}'}).args == {"split": "train"}
    with pytest.raises(ValueError, match="JSON"):
        EnvironmentTable.model_validate({"args": text})


VERIFIERS = {"provider": "verifiers", "id": "a/b"}
EXTRAS = {f"retrain-rewards[{name}]" for name in ("judge", "mcp", "openenv", "reasoning-gym", "verifiers")}


def found(reward=None, environment=None, **data):
    tables = {
        "data": DataTable(**({"source": "arithmetic"} | data)),
        "reward": RewardTable(**(reward or {})),
        "environment": EnvironmentTable(**(environment or {})),
    }
    return {finding.name: finding for finding in diagnose(Config(tables=tables))}


def needed(findings):
    return {name for name, finding in findings.items() if finding.needed}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, set()),
        ({"source": "reasoning_gym"}, {"retrain-rewards[reasoning-gym]"}),
        ({"environment": VERIFIERS}, {"retrain-rewards[verifiers]"}),
        ({"reward": {"type": "judge", "judge_model": "m"}}, {"retrain-rewards[judge]", "judge's key"}),
        ({"reward": {"weights": {"judge": 1.0, "match": 1.0}}}, {"retrain-rewards[judge]", "judge's key"}),
        (  # it brings its own tasks and scoring
            {"reward": {"type": "judge"}, "source": "reasoning_gym", "environment": VERIFIERS},
            {"retrain-rewards[verifiers]"},
        ),
        (
            {"source": "reasoning_gym", "environment": {"provider": "mcp"}},
            {"retrain-rewards[mcp]", "retrain-rewards[reasoning-gym]"},  # it plays those tasks
        ),
        (
            {"environment": {"provider": "openenv", "args": {"url": "http://127.0.0.1:9"}}},
            {"retrain-rewards[openenv]", "environment"},
        ),
    ],
)
def test_a_configuration_needs_what_it_names_and_no_more(settings, wanted):
    assert needed(found(**settings)) == wanted
    findings = {finding.name: finding for finding in diagnose(None)}
    assert (set(findings), needed(findings)) == (EXTRAS | {"sandbox"}, set())


def test_the_judge_needs_a_key_and_a_server_that_answers(monkeypatch):
    reward = {"type": "judge", "judge_model": "m", "judge_api_key_env": "MY_JUDGE_KEY"}
    monkeypatch.delenv("MY_JUDGE_KEY", raising=False)
    assert found(reward)["judge's key"].is_fatal
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-not-to-be-shown")
    findings = found(reward)
    assert findings["judge's key"].status == "ok"
    assert "sk-not-to-be-shown" not in repr(findings)
    with serving() as server:
        here = found(reward | {"judge_base_url": server.url})
        monkeypatch.delenv("MY_JUDGE_KEY")
        keyless = found(reward | {"judge_base_url": server.url})["judge's key"]
    assert here["judge"].status == "ok"
    assert (keyless.status, keyless.is_fatal) == ("warn", False)
    assert found(reward | {"judge_base_url": server.url})["judge"].is_fatal


def test_the_reward_code_needs_a_sandbox_that_works(monkeypatch):
    monkeypatch.setattr(doctor, "find_sandbox", lambda: (None, "bwrap: no permissions"))
    refused = found({"type": "code"})["sandbox"]
    assert refused.is_fatal
    assert "bwrap: no permissions" in refused.detail
    assert "unsafe = true" in refused.fix
    assert not found({"type": "match"})["sandbox"].needed
    allowed = found({"type": "code", "unsafe": True})["sandbox"]
    assert (allowed.status, allowed.is_fatal) == ("warn", False)
    assert "WITHOUT ONE, with your rights" in allowed.detail
    works = Sandbox(name="bubblewrap 9", command=("bwrap",), calls=b"x")
    monkeypatch.setattr(doctor, "find_sandbox", lambda: (works, ""))
    assert (found({"type": "code"})["sandbox"].status, found({"type": "code"})["sandbox"].needed) == ("ok", True)


@pytest.mark.parametrize("source", ["files", "math", "gsm8k"])
def test_a_path_must_be_there(source, tmp_path):
    assert found(source=source, path=str(tmp_path / "none"))["data"].is_fatal
    assert found(source=source, path=str(tmp_path))["data"].status == "ok"
    assert "data" not in found(source="math")
    assert found(source="hub", path=str(tmp_path))["data"].status == "ok"
    assert "data" not in found(source="hub", path="openai/gsm8k")
