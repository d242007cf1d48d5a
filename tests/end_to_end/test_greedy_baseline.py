"""A run whose advantage compares with a greedy completion: counted, recorded, repeated, resumed and controlled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.running import records, retrain, tiny, untimed

REMAX = ("--advantage-mode", "remax", "--transform-mode", "none", "--batch-size", "4", "--group-size", "2")
SHORT = (*REMAX, "--eval-examples", "0", "--save-every", "2")


def first(run: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """The line of the first step, and the records of its completions."""
    line = records(run / "metrics.jsonl")[0]
    return line, [each for each in records(run / "emergence/generations.jsonl") if each["step"] == 0]


@pytest.mark.slow
def test_it_is_counted_in_tokens_and_trained_on_nowhere(tmp_path: Path) -> None:
    tiny(*SHORT, "--max-steps", "3", "--log-dir", "a", cwd=tmp_path)
    line, completions = first(tmp_path / "a")
    drawn = sum(int(str(each["num_tokens"])) for each in completions)
    assert len(completions) == 8
    assert line["greedy_tokens"] > 0
    assert line["sampled_tokens"] == drawn + line["greedy_tokens"]
    assert line["trained_tokens"] <= drawn
    assert 0.0 <= line["greedy_reward_mean"] <= 1.0
    rewards = {each["group"]: each["greedy_reward"] for each in completions}
    assert sum(rewards.values()) / 4 == pytest.approx(line["greedy_reward_mean"])
    # with rewards of 0 and 1 a group teaches exactly where a completion differs from the greedy one
    differs = {each["group"] for each in completions if each["reward"] != each["greedy_reward"]}
    assert {each["group"] for each in completions if each["trained"]} >= differs
    # one completion per prompt and its baseline are enough
    tiny(*SHORT, "--group-size", "1", "--max-steps", "1", "--log-dir", "one", cwd=tmp_path)
    assert first(tmp_path / "one")[0]["greedy_tokens"] > 0


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_it_repeats_and_resumes_to_the_bit(devices: str, tmp_path: Path) -> None:
    given = (*SHORT, "--devices", devices)
    tiny(*given, "--max-steps", "4", "--log-dir", "a", cwd=tmp_path)
    tiny(*given, "--max-steps", "2", "--log-dir", "b", cwd=tmp_path)
    tiny("--resume", "b", "--max-steps", "4", cwd=tmp_path)
    named = [
        [{name: value for name, value in line.items() if "greedy" in name or name == "loss"} for line in untimed(file)]
        for file in (tmp_path / "a/metrics.jsonl", tmp_path / "b/metrics.jsonl")
    ]
    assert named[0] == named[1]
    assert all(line["greedy_tokens"] for line in named[0])


@pytest.mark.long
def test_every_round_of_prompts_has_its_own_and_a_control_replaces_their_scores(tmp_path: Path) -> None:
    tiny(*SHORT, "--refill", "2", "--max-steps", "1", "--log-dir", "rounds", cwd=tmp_path)
    line, completions = first(tmp_path / "rounds")
    assert all("greedy_reward" in each for each in completions)
    assert line["sampled_tokens"] == sum(int(str(e["num_tokens"])) for e in completions) + line["greedy_tokens"]
    tiny(*SHORT, "--batch-size", "16", "--control", "random_reward", "--max-steps", "1", "--log-dir", "c", cwd=tmp_path)
    rewards = {each["group"]: each["greedy_reward"] for each in first(tmp_path / "c")[1]}
    assert len(set(rewards.values())) == 2, "coins, on a model that is mostly right or mostly wrong"


@pytest.mark.slow
def test_explain_counts_it_and_other_credit_is_refused_without_it(tmp_path: Path) -> None:
    tiny("--max-steps", "1", "--eval-examples", "0", "--log-dir", "plain", cwd=tmp_path)
    found = json.loads(retrain("explain", "--json", *REMAX, cwd=tmp_path).out)
    assert found["max_tokens_per_step"] == (4 * 2 + 4) * 64
    forecast = json.loads(retrain("capacity", "--json", *REMAX, cwd=tmp_path).out)
    assert (forecast["completions_per_step"], forecast["max_tokens_per_step"]) == (4 * 2, (4 * 2 + 4) * 64)
    refused = retrain("credit", "plain", "--advantage", "remax", "--transform", "none", cwd=tmp_path)
    assert refused.code != 0
    assert "needs a greedy completion of each prompt, and there are not any" in refused.err
