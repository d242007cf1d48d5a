"""`retrain audit`: the reward of a configuration, tried in the processes that would score a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.problems import codes_in

Command = Callable[..., Any]
LIARS = """
import os
from retrain.api import PluginSpec

class Lenient:
    def __init__(self, context=None):
        pass

    def score(self, example, text):
        return float(example.reference in text or not text)

    def gold(self, example):
        return "\\\\boxed{" + example.reference + "}"

class Exits(Lenient):
    def score(self, example, text):
        os._exit(3)

class Strange(Lenient):
    def score(self, example, text):
        raise ValueError("\\x1b[31m" + text)

def score(response, reference):
    return float(response == [reference])
"""


@pytest.fixture
def audit(command: Command, toys: Path, tokenizer_folder: Path, tmp_path: Path) -> Command:
    """`audit("--json")`: the toy data and the toy reward, unless another is named."""
    (tmp_path / "liars.py").write_text(LIARS, encoding="utf-8")
    base = ["--model", str(tokenizer_folder), "--backend", "toy", "--data-source", "toy", "--set", "scoring.retries=0"]

    def call(*arguments: str) -> Any:
        reward = [] if any(word.startswith("--reward") for word in arguments) else ["--reward-type", "toy"]
        return command("audit", *base, *reward, *arguments)

    return call


def test_an_honest_reward_passes_on_at_most_all_examples(audit: Command) -> None:
    result = audit("--set", "scoring.audit_examples=500")
    assert result.code == 0, result.err + result.out
    assert result.out.endswith("ok\nPASS\n")
    assert "Reward audit: 12 examples, gold 12/12 correct, 0 of " in result.out
    content = json.loads(audit("--examples", "3", "--json").out)
    assert (content["ok"], content["examples"], content["rewards"]) == (True, 3, ["toy"])
    assert (content["checks"]["gold"]["correct"], content["timeout_s"]) == (3, 10.0)


def test_a_reward_that_lies_fails_with_every_cause_once(audit: Command) -> None:
    result = audit("--reward-type", "liars.Lenient", "--examples", "2")
    assert result.code == 1
    assert result.out.endswith("FAIL\n")
    assert result.out.count("[ERROR] [empty] 2 of 2 examples, first ") == 1
    content = json.loads(audit("--reward-type", "liars.Lenient", "--json").out)
    assert (content["ok"], content["causes"][0]["examples"]) == (False, 8)


def test_a_function_without_gold_that_is_never_right_fails(audit: Command) -> None:
    result = audit("--reward-type", "custom", "--reward-custom-module", "liars", "--reward-custom-function", "score")
    assert result.code == 1, result.err
    assert "[ERROR] [gold] 8 of 8 examples, first " in result.out
    assert "gold 0/8 correct" in result.out


@pytest.mark.parametrize("name", ["Exits", "Strange"])
def test_a_reward_that_breaks_is_reported_not_raised(audit: Command, name: str) -> None:
    result = audit("--reward-type", f"liars.{name}")
    assert result.code == 1
    assert "scoring failed" in result.out
    assert "\x1b" not in result.out
    assert "Examples : 1" in result.out


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ("--reward-type toyy", "toyy"),
        ("--examples 0", "--examples"),
        ("--batch-siz 3", "--batch-siz"),
        ("--examples 13", "--examples"),
        ("--words 9", "--words"),
        ("--allowed 0.5", "--allowed"),
        ("--contamination --examples 3", "--examples"),
        ("nowhere.toml", "nowhere.toml"),
    ],
)
def test_nothing_that_is_typed_is_ignored(audit: Command, arguments: str, place: str) -> None:
    result = audit(*arguments.split())
    assert result.code == 2
    assert place in result.err


def test_data_that_cannot_be_used_is_refused(audit: Command) -> None:
    result = audit("--data-opt", "count=0")
    assert (result.code, codes_in(result.err)) == (2, ["data.no-examples"])
