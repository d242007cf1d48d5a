"""`retrain audit --replay`: what failed is scored again by the run's own reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.types import Example
from retrain.tasks.scoring.failures import FailureRecord, write_failures
from tests.kit.problems import codes_in

REWARDS = """
import os
from retrain.api import Score
class Reward:
    def __init__(self, context):
        self.vocabulary = len(context.tokenizer)
    def score(self, example, text):
        if text.startswith("die"):
            os._exit(7)
        if text.startswith("unclear"):
            return Score.no_verdict("cannot \\x1b[31mtell")
        return float(text == example.reference and self.vocabulary > 0)
"""
CONFIG = """
[model]
model = "{tokenizer}"
[data]
source = "toy"
[reward]
type = "replay_rewards.Reward"
[scoring]
workers = 1
memory_gb = 4.0
timeout_s = 20.0
"""


def failed(folder: Path, *texts: str, reward: str = "replay_rewards.Reward") -> None:
    given: dict[str, Any] = {"detail": "timed out after 10 s", "attempts": 2, "seconds": 10.0, "weight": 1.0}
    example = Example(id="e", prompt="p", reference="7")
    records = [FailureRecord(reward=reward, example=example, text=text, **given) for text in texts]
    write_failures(folder, "step_1", records)


@pytest.fixture
def run(tmp_path: Path, toys: Path, tokenizer_folder: Path) -> Path:
    (tmp_path / "replay_rewards.py").write_text(REWARDS, encoding="utf-8")
    folder = tmp_path / "logs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(tokenizer=tokenizer_folder), encoding="utf-8")
    return folder


def test_what_fails_again_or_has_no_verdict_is_said_and_told_apart(run: Path, command: Callable[..., Any]) -> None:
    failed(run / "failures", "7", "die", "unclear")
    done = command("audit", "--replay", str(run / "failures"), "--json")
    assert done.code == 1
    results = json.loads(done.out)
    assert [result["outcome"] for result in results] == ["scored", "failed", "no_verdict"]
    assert results[1]["detail"] == "the scoring process exited with code 7"
    assert results[0]["value"] == 1.0
    done = command("audit", "--replay", "logs/a/failures/step_1_0.json")
    assert (done.code, "step_1_0.json  replay_rewards.Reward: scored 1 " in done.out) == (0, True)
    assert done.out.endswith("(then: timed out after 10 s)\n")
    shown = command("audit", "--replay", str(run / "failures" / "step_1_2.json"))
    assert shown.code == 1
    assert "no verdict" in shown.out
    assert "\x1b" not in shown.out


def test_another_configuration_and_rewards_that_it_does_not_have(
    run: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    failed(tmp_path / "kept", "7")
    assert codes_in(command("audit", "--replay", "kept").err) == ["replay.no-configuration"]
    found = command("audit", str(run / "config.toml"), "--replay", "kept/step_1_0.json")
    assert found.code == 0, found.err
    failed(run / "failures", "7", reward="judge")
    assert codes_in(command("audit", "--replay", str(run / "failures")).err) == ["replay.reward-missing"]


def test_a_verifier_of_the_data_source_is_found_again(
    run: Path, command: Callable[..., Any], distribution: Callable[..., Path]
) -> None:
    source = (
        "from retrain.api import LoadedData, PluginSpec, hookimpl\n"
        "class Verifier:\n    def score(self, example, text):\n        return 0.25\n"
        "class Source:\n    def __init__(self, context):\n        pass\n"
        "    def load(self):\n        return LoadedData(examples=(), reward=Verifier())\n"
        "@hookimpl\ndef retrain_register_data_sources(register):\n"
        "    register(PluginSpec(name='verified', summary='s', factory=Source))\n"
    )
    distribution("retrain-verified", {"verified_parts": source})
    config = run / "config.toml"
    config.write_text(config.read_text().replace('"toy"', '"verified"'))
    failed(run / "failures", "7", reward="verified")
    done = command("audit", "--replay", str(run / "failures"), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)[0]["value"] == 0.25


@pytest.mark.parametrize("content", ["{}", None])
def test_a_file_that_is_no_failure_is_refused(content: str | None, command: Callable[..., Any], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    done = command("audit", "--replay", "x.json")
    assert (done.code, "x.json" in done.err) == (2, True)
