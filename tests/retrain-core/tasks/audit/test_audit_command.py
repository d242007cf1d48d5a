"""`retrain audit`: the reward of a configuration, tried in the processes that would score a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

LIARS = """
class Lenient:
    def score(self, example, text):
        return float(example.reference in text or not text)

    def gold(self, example):
        return "\\\\boxed{" + example.reference + "}"


class Exits(Lenient):
    def score(self, example, text):
        import os
        os._exit(3)


class Strange(Lenient):
    def score(self, example, text):
        raise ValueError("\\x1b[31m" + text)


def lenient(context):
    return Lenient()


def exits(context):
    return Exits()


def strange(context):
    return Strange()
"""


@pytest.fixture
def audit(command: Command, toys: Path, tokenizer_folder: Path, tmp_path: Path) -> Command:
    """`audit("--json")`: the toy data and the toy reward, unless something else is asked for."""
    (tmp_path / "liars.py").write_text(LIARS, encoding="utf-8")
    base = ["--model", str(tokenizer_folder), "--backend", "toy", "--data-source", "toy", "--set", "scoring.retries=0"]

    def call(*arguments: str) -> Any:
        reward = [] if any(word.startswith("--reward") for word in arguments) else ["--reward-type", "toy"]
        return command("audit", *base, *reward, *arguments)

    return call


def test_an_honest_reward_passes(audit: Command) -> None:
    result = audit()
    assert result.code == 0, result.err + result.out
    assert result.out.endswith("ok\nPASS\n")
    assert "made 12 toys" in result.out
    assert "Reward   : toy" in result.out
    assert "Reward audit: 8 examples, gold 8/8 correct, 0 of " in result.out


def test_json_and_the_number_of_examples(audit: Command) -> None:
    result = audit("--examples", "3", "--json")
    assert result.code == 0
    content = json.loads(result.out)
    assert (content["ok"], content["examples"], content["rewards"]) == (True, 3, ["toy"])
    assert content["checks"]["gold"]["correct"] == 3
    assert content["timeout_s"] == 10.0
    assert json.loads(audit("--json", "--set", "scoring.audit_examples=2").out)["examples"] == 2


def test_a_reward_that_lies_fails_with_every_finding(audit: Command) -> None:
    result = audit("--reward-type", "liars.lenient", "--examples", "2")
    assert result.code == 1
    assert result.out.endswith("FAIL\n")
    assert result.out.count("[ERROR] [empty] 2 of 2 examples, first ") == 1
    assert result.out.count("a sentence that denies the right answer is correct") == 1
    content = json.loads(audit("--reward-type", "liars.lenient", "--json").out)
    assert content["ok"] is False
    assert content["causes"][0]["examples"] == 8


def test_a_function_without_gold_that_is_never_right_fails(audit: Command, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text("def score(response, reference):\n    return float(response == [reference])\n")
    result = audit("--reward-type", "custom", "--reward-custom-module", "strict", "--reward-custom-function", "score")
    assert result.code == 1, result.err
    assert "[ERROR] [gold] 8 of 8 examples, first " in result.out
    assert "gold 0/8 correct" in result.out
    assert result.out.endswith("FAIL\n")


@pytest.mark.parametrize("name", ["exits", "strange"])
def test_a_reward_that_breaks_is_reported_not_raised(audit: Command, name: str) -> None:
    result = audit("--reward-type", f"liars.{name}")
    assert result.code == 1
    assert "scoring failed" in result.out
    assert "\x1b" not in result.out
    assert "Examples : 1" in result.out


def test_faults_of_the_configuration_come_first(audit: Command, command: Command) -> None:
    assert audit("--reward-type", "toyy").code == 2
    missing = command("audit", "nowhere.toml")
    assert missing.code == 2
    assert "nowhere.toml" in missing.err
    assert audit("--examples", "0").code == 2
    assert audit("--batch-siz", "3").code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--examples", "13"), "--examples: 13 examples wanted, but the data source has 12"),
        (("--words", "9"), "--words: has no effect without --contamination"),
        (("--allowed", "0.5"), "--allowed: has no effect without --contamination"),
        (("--contamination", "--examples", "3"), "--examples: has no effect without --model-probe"),
    ],
)
def test_nothing_that_is_typed_is_ignored(audit: Command, arguments: tuple[str, ...], expected: str) -> None:
    result = audit(*arguments)
    assert result.code == 2
    assert expected in result.err


def test_the_key_is_a_limit(audit: Command) -> None:
    result = audit("--json", "--set", "scoring.audit_examples=500")
    assert json.loads(result.out)["examples"] == 12


def test_data_that_cannot_be_used_is_told(audit: Command) -> None:
    result = audit("--data-opt", "count=0")
    assert result.code == 2
    assert "the data source gave no examples" in result.err
