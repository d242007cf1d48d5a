"""What this distribution tells the doctor: which extras a configuration needs, the judge's server and key, the data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Config, Diagnosis
from retrain.kernel.config.schema import DataTable
from retrain_rewards import doctor
from retrain_rewards.doctor import diagnose
from retrain_rewards.sandbox.sandbox import Sandbox
from retrain_rewards.tables import EnvironmentTable, RewardTable
from tests.kit.judge_server import serving

EXTRAS = {f"retrain-rewards[{name}]" for name in ("judge", "mcp", "openenv", "reasoning-gym", "verifiers")}


def found(
    reward: dict[str, Any] | None = None, environment: dict[str, Any] | None = None, **data: Any
) -> dict[str, Diagnosis]:
    tables = {
        "data": DataTable(**({"source": "arithmetic"} | data)),
        "reward": RewardTable(**(reward or {})),
        "environment": EnvironmentTable(**(environment or {})),
    }
    return {finding.name: finding for finding in diagnose(Config(tables=tables))}


def needed(findings: dict[str, Diagnosis]) -> set[str]:
    return {name for name, finding in findings.items() if finding.needed}


def test_without_a_configuration_the_extras_are_shown_and_none_is_needed() -> None:
    findings = {finding.name: finding for finding in diagnose(None)}
    assert set(findings) == EXTRAS | {"sandbox"}
    assert needed(findings) == set()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, set()),
        ({"source": "reasoning_gym"}, {"retrain-rewards[reasoning-gym]"}),
        ({"environment": {"provider": "verifiers", "id": "a/b"}}, {"retrain-rewards[verifiers]"}),
        ({"reward": {"type": "judge", "judge_model": "m"}}, {"retrain-rewards[judge]", "judge's key"}),
        ({"reward": {"weights": {"judge": 1.0, "match": 1.0}}}, {"retrain-rewards[judge]", "judge's key"}),
        (
            {
                "reward": {"type": "judge"},
                "source": "reasoning_gym",
                "environment": {"provider": "verifiers", "id": "a/b"},
            },
            {"retrain-rewards[verifiers]"},  # it brings tasks and scoring of its own
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
def test_a_configuration_needs_what_it_names_and_no_more(settings: dict[str, Any], wanted: set[str]) -> None:
    assert needed(found(**settings)) == wanted


def test_the_judge_needs_a_key_and_a_server_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_reward_code_needs_a_sandbox_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_path_must_be_there(source: str, tmp_path: Path) -> None:
    assert found(source=source, path=str(tmp_path / "none"))["data"].is_fatal
    assert found(source=source, path=str(tmp_path))["data"].status == "ok"
    assert "data" not in found(source="math")
    assert found(source="hub", path=str(tmp_path))["data"].status == "ok"
    assert "data" not in found(source="hub", path="openai/gsm8k")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_path_must_be_readable(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("{}")
    file.chmod(0)
    assert "cannot be read" in found(source="files", path=str(file))["data"].detail
